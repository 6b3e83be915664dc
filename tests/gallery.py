"""The gallery: classes that are wrong in one way, beside the clause that must catch each."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import faulty_dropout
import faulty_gradients
import faulty_numbers
import faulty_options
import faulty_paths
import faulty_state
from complete import CLAIMS, Complete

import faulty
from correct import Correct
from mha.spec import Claims


class Fault(NamedTuple):
    """A faulty class, the section of the gallery that it is from, and the clause that names its defect.

    by: the property that must catch it, where the clause has several. claims: those of its base unless given.
    shown: whether a script can show it alone; what the judge measures by other means than calls, it cannot.
    """

    cls: type[Correct | Complete]
    section: str
    clause: str
    dtype: str = "float32"
    by: str = ""
    claims: Claims | None = None
    shown: bool = True


HALF = "bfloat16"
ALONE = "each_weight_is_dropped_alone_or_rescaled"
UNIFORM = replace(CLAIMS, empty_row="uniform")
FAULTS = (
    Fault(faulty.Unscaled, "arithmetic", "SMX-6"),
    Fault(faulty.ScaledByModelWidth, "arithmetic", "SMX-6"),
    Fault(faulty.ScaleInSinglePrecision, "arithmetic", "NUM-2", "float64"),
    Fault(faulty.SoftmaxOverQueries, "arithmetic", "SMX-2"),
    Fault(faulty.MaskAfterSoftmax, "arithmetic", "SMX-1"),
    Fault(faulty.NoMaximumTakenOff, "arithmetic", "SMX-4"),
    Fault(faulty_numbers.ScoresClamped, "arithmetic", "SMX-3"),
    Fault(faulty_numbers.WeightsTooLarge, "arithmetic", "SMX-5"),
    Fault(faulty_numbers.LaterKeysFavoured, "arithmetic", "EQV-3"),
    Fault(faulty_numbers.ValuesClipped, "arithmetic", "EQV-4"),
    Fault(faulty_numbers.LaterKeysFavoured, "arithmetic", "EQV-5", by="zero_queries_give_the_mean"),
    Fault(faulty_numbers.AlmostOne, "arithmetic", "EQV-5", by="zero_queries_over_a_power_of_two_of_keys_are_exact"),
    Fault(faulty_numbers.AlmostOne, "arithmetic", "EQV-6", by="a_key_that_wins_by_far_gives_its_value_exactly"),
    Fault(faulty_numbers.Sink, "arithmetic", "EQV-7"),
    Fault(faulty_numbers.ValueByKeyProjection, "arithmetic", "EQV-9"),
    Fault(faulty_numbers.SoftmaxInBfloat16, "arithmetic", "NUM-1", by="results_are_within_the_bound"),
    Fault(faulty_numbers.ScoresInHalf, "arithmetic", "NUM-1"),
    Fault(faulty_numbers.SummedOneByOne, "arithmetic", "NUM-3", HALF, shown=False),
    Fault(faulty_numbers.FillThatDoesNotFit, "arithmetic", "NUM-4", "float16"),
    Fault(faulty_numbers.FirstThousandKeys, "sizes", "NUM-5"),
    Fault(faulty_numbers.SixtyFourColumns, "sizes", "NUM-1", by="results_of_everyday_sizes_are_within_the_bound"),
    Fault(faulty_numbers.ValuesNormalised, "arithmetic", "NUM-6"),
    Fault(faulty.HeadsByViewAlone, "heads", "HED-1"),
    Fault(faulty.HeadsReversed, "heads", "HED-1"),
    Fault(faulty.FirstHeadForAll, "heads", "HED-2"),
    Fault(faulty_numbers.FirstHeadLouder, "heads", "HED-3"),
    Fault(faulty_numbers.OneHeadNotProjected, "heads", "HED-4"),
    Fault(faulty_numbers.OutputClipped, "heads", "HED-5"),
    Fault(faulty.PolarityReversed, "masks", "MSK-1"),
    Fault(faulty_paths.ShortFill, "masks", "MSK-2"),
    Fault(faulty_paths.ShortFill, "masks", "MSK-3"),
    Fault(faulty_paths.AnyMaskAnotherScale, "masks", "MSK-4"),
    Fault(faulty_paths.FlatMaskForgotten, "masks", "MSK-5", by="mask_of_fewer_dimensions_is_broadcast"),
    Fault(faulty.HeadMaskIgnoredWithoutQueries, "masks", "MSK-5", by="broadcast_mask_equals_expanded"),
    Fault(faulty.MaskOfFirstItem, "masks", "MSK-6"),
    Fault(faulty.CausalMaskOfFirstCall, "masks", "MSK-6"),
    Fault(faulty.LastKeyNeverMasked, "masks", "MSK-7"),
    Fault(faulty.FiniteFill, "masks", "MSK-8", by="empty_rows_follow_the_declared_policy"),
    Fault(faulty.NanInEmptyRow, "masks", "MSK-8"),
    Fault(faulty.EmptyUnderCausal, "masks", "MSK-8"),
    Fault(faulty_numbers.FillThatRunsOver, "masks", "MSK-8", by="empty_rows_give_zeros", claims=UNIFORM, shown=False),
    Fault(faulty.EmptyRowSpoilsItem, "masks", "MSK-9", by="empty_rows_leave_other_rows_alone"),
    Fault(faulty_gradients.NanToNumber, "gradients", "MSK-9", by="empty_rows_leave_other_gradients_alone"),
    Fault(faulty_paths.MaskedKeysReadAtZeroWeight, "masks", "MSK-10"),
    Fault(faulty_paths.NanSwallowed, "masks", "MSK-10"),
    Fault(faulty_paths.FloatMaskAsBoolean, "masks", "MSK-11", by="additive_and_boolean_masks_agree"),
    Fault(faulty_paths.FiniteMaskForgotten, "masks", "MSK-11", by="additive_mask_is_a_bias_on_the_scores"),
    Fault(faulty_paths.LowestNumberAsInfinity, "masks", "MSK-11", by="the_lowest_number_is_no_infinity"),
    Fault(faulty_paths.MaskCropped, "masks", "MSK-12", by="masks_of_a_wrong_shape_are_refused"),
    Fault(faulty.IntegerMaskAsBoolean, "masks", "MSK-12", by="masks_of_an_unclaimed_dtype_are_refused"),
    Fault(faulty_paths.ShortFill, "masks", "EQV-6", by="one_allowed_key_gives_its_value"),
    Fault(faulty.CausalOffByOne, "masks", "CAU-1"),
    Fault(faulty.CausalOffByOne, "masks", "CAU-2"),
    Fault(faulty.CausalFromTheRight, "masks", "CAU-3"),
    Fault(faulty.CausalForgottenBesideMask, "masks", "CAU-4"),
    Fault(faulty_paths.AnotherScaleWithWeights, "paths", "PTH-1"),
    Fault(faulty_paths.AnotherScaleWithoutGradient, "paths", "PTH-2", by="modes_change_no_output"),
    Fault(faulty_paths.NanForEmptyRowsInFastPath, "paths", "PTH-2", by="modes_change_no_output"),
    Fault(faulty_paths.FastPathOfSelfAttention, "paths", "PTH-2", by="modes_change_no_output_of_self_attention"),
    Fault(faulty_paths.FloatMaskAsBoolean, "paths", "PTH-3"),
    Fault(faulty_paths.HintOverridesMask, "paths", "PTH-4"),
    Fault(faulty_paths.ExtraKeyFirst, "paths", "PTH-5"),
    Fault(faulty_paths.LengthFirstForgotten, "paths", "PTH-5"),
    Fault(faulty_paths.PositionsAsItems, "paths", "PTH-5"),
    Fault(faulty_options.ExtraKeyDetached, "paths", "PTH-5", by="extra_keys_have_gradients"),
    Fault(faulty_paths.ZeroKeyMasked, "paths", "PTH-5", by="extras_match_the_oracle"),
    Fault(faulty.LaterGradientLeaks, "gradients", "CAU-5"),
    Fault(
        faulty_gradients.GradientUntold, "gradients", "GRD-1", by="the_gradients_of_all_weights_are_told", shown=False
    ),
    Fault(faulty_gradients.NoneTold, "gradients", "GRD-1", by="the_gradients_of_all_weights_are_told"),
    Fault(
        faulty_gradients.OutputWeightForgottenInHalf,
        "gradients",
        "GRD-1",
        HALF,
        by="half_gradients_are_within_the_bound",
    ),
    Fault(
        faulty_gradients.WideHeadsDetached, "gradients", "GRD-1", by="gradients_of_everyday_sizes_are_within_the_bound"
    ),
    Fault(faulty_gradients.LateKeysDetached, "gradients", "GRD-1", by="long_rows_have_gradients"),
    Fault(
        faulty_gradients.NothingDroppedInGradients,
        "gradients",
        "GRD-1",
        by="gradients_drop_what_the_outputs_dropped",
        shown=False,
    ),
    Fault(faulty_gradients.DetachedKeys, "gradients", "GRD-1", by="gradients_are_within_the_bound"),
    Fault(faulty_gradients.DataInside, "gradients", "GRD-1", by="gradients_are_within_the_bound"),
    Fault(faulty_gradients.GradientTooLarge, "gradients", "GRD-1", "float64", by="gradients_are_within_the_bound"),
    Fault(faulty_gradients.GradientTooLarge, "gradients", "GRD-1", by="gradients_are_within_the_bound"),
    Fault(
        faulty_gradients.GradientFarTooLarge,
        "gradients",
        "GRD-1",
        HALF,
        by="half_gradients_are_no_worse_than_plain",
        shown=False,
    ),
    Fault(faulty_gradients.GradientFarTooLarge, "gradients", "GRD-2", "float64", shown=False),
    Fault(faulty_gradients.DetachedKeys, "gradients", "GRD-2", "float64", shown=False),
    Fault(faulty_gradients.GradientOfScoresNotDropped, "gradients", "GRD-2", "float64", shown=False),
    Fault(faulty_gradients.MaskedKeysPulled, "gradients", "GRD-3"),
    Fault(faulty_gradients.NanToNumber, "gradients", "GRD-4"),
    Fault(faulty_gradients.ValueAloneForgotten, "gradients", "GRD-5", by="any_subset_has_the_same_gradients"),
    Fault(faulty_gradients.WeightsAloneForgotten, "gradients", "GRD-5", by="any_subset_has_the_same_gradients"),
    Fault(faulty_gradients.FrozenForgotten, "gradients", "GRD-5", by="frozen_weights_change_no_gradient"),
    Fault(faulty_gradients.AnotherScaleWhenRecorded, "gradients", "GRD-5", by="recording_changes_no_output"),
    Fault(faulty_gradients.MaskGradientDropped, "gradients", "GRD-6"),
    Fault(faulty_gradients.MaskGradientOfFirstHead, "gradients", "GRD-6"),
    Fault(faulty_gradients.GradientOfScoresShifted, "gradients", "GRD-7", by="the_key_bias_has_no_gradient"),
    Fault(
        faulty_gradients.GradientOfScoresShifted,
        "gradients",
        "GRD-7",
        by="the_gradients_of_a_row_sum_to_zero",
    ),
    Fault(faulty_dropout.DropsInEvaluation, "dropout", "DRP-1"),
    Fault(faulty_dropout.DropsAtZero, "dropout", "DRP-1"),
    Fault(faulty_dropout.NotRescaled, "dropout", "DRP-2"),
    Fault(faulty_dropout.MaskDropped, "dropout", "DRP-2"),
    Fault(faulty_dropout.AnotherProbability, "dropout", "DRP-2", by="the_share_that_is_dropped_is_p"),
    Fault(faulty_dropout.OneDrawForAllQueries, "dropout", "DRP-2", by=ALONE),
    Fault(faulty_dropout.OneDrawForAllKeys, "dropout", "DRP-2", by=ALONE),
    Fault(faulty_dropout.NotRescaledForManyKeys, "dropout", "DRP-2", by=ALONE),
    Fault(faulty_dropout.DropsContexts, "dropout", "DRP-2", by=ALONE),
    Fault(faulty_dropout.FixedSeed, "dropout", "DRP-3", by="the_seed_decides_what_is_dropped"),
    Fault(faulty_dropout.SeedIgnored, "dropout", "DRP-3", by="the_seed_decides_what_is_dropped"),
    Fault(faulty_dropout.NanForAll, "dropout", "DRP-3", by="dropping_everything_is_not_nan"),
    Fault(faulty_dropout.WeightsAfterDropout, "dropout", "DRP-4"),
    Fault(faulty.ForgetsMemory, "state", "EQV-8"),
    Fault(faulty.ScalesQueryInPlace, "state", "STA-1"),
    Fault(faulty_state.MaskTurnedInPlace, "state", "STA-1", shown=False),
    Fault(faulty_state.WeightsDrift, "state", "STA-1", shown=False),
    Fault(faulty_state.QueryGivenBack, "state", "STA-2"),
    Fault(faulty_state.BufferUsedAgain, "state", "STA-2", shown=False),
    Fault(faulty_state.ResultsByShape, "state", "EQV-2"),
    Fault(faulty_state.Tires, "state", "STA-3", by="calls_do_not_depend_on_calls_before"),
    Fault(faulty_state.SpoiltByRefusal, "state", "STA-3", shown=False),
    Fault(faulty_state.MaskByAddress, "state", "STA-3", by="tensors_may_change_between_calls", shown=False),
    Fault(
        faulty_state.LastCallDifferentiated,
        "state",
        "STA-3",
        by="calls_between_change_no_gradient",
        shown=False,
    ),
    Fault(faulty_state.TiresOfAll, "state", "NUM-1", shown=False),
    Fault(faulty_state.ResultsByIdentity, "state", "NUM-1", shown=False),
    Fault(faulty_state.ResultsByAddress, "state", "NUM-1", shown=False),
    Fault(faulty_state.WeightsCopied, "state", "STA-4", shown=False),
    Fault(faulty_state.CopyForgets, "state", "STA-4"),
    Fault(faulty_state.WeightsPacked, "state", "STA-4", shown=False),
    Fault(faulty_state.DrawsWithoutDropout, "state", "STA-5", shown=False),
    Fault(faulty_state.DefaultDtypeChanged, "state", "STA-5", shown=False),
    Fault(faulty_state.GradientModeChanged, "state", "STA-5", shown=False),
    Fault(faulty_state.WarningsSilenced, "state", "STA-5", shown=False),
    Fault(faulty_state.RunningMean, "state", "STA-6", shown=False),
    Fault(faulty_state.AnotherScaleInTraining, "state", "STA-6"),
    Fault(faulty_state.Scratch, "state", "STA-7", shown=False),
    Fault(faulty.DependsOnBatchSize, "state", "EQV-1", by="batch_size_does_not_matter"),
    Fault(faulty.ReadsOtherItems, "state", "EQV-1", by="other_items_have_no_influence"),
    Fault(faulty.DropsKeyAfterTile, "sizes", "NUM-1"),
    Fault(faulty.SqueezesBatchOfOne, "sizes", "SHP-1"),
    Fault(faulty.SqueezesBatchOfOne, "sizes", "SHP-4"),
    Fault(faulty.ReadsMemoryAsDense, "layouts", "SHP-7"),
    Fault(faulty_paths.AverageOfWeights, "shapes", "SHP-2"),
    Fault(faulty_paths.AlwaysDouble, "shapes", "SHP-3"),
    Fault(faulty_paths.NeedsKeys, "shapes", "SHP-5"),
    Fault(faulty.BatchOfKeysBroadcast, "shapes", "SHP-6"),
    Fault(faulty.NoValidation, "configuration", "CFG-1"),
    Fault(faulty_paths.RefusalSaysNothing, "configuration", "CFG-2", shown=False),
    Fault(faulty_paths.NegativeHeads, "configuration", "CFG-3"),
    Fault(faulty.RefusesHeadsOfWidthOne, "configuration", "CFG-4"),
    Fault(faulty_paths.BiasAllTheSame, "configuration", "CFG-5"),
    Fault(faulty_paths.DropoutUnchecked, "configuration", "CFG-6"),
    Fault(faulty_options.AnotherScaleCompiled, "composition", "CMP-1", by="compiled_agrees_with_eager"),
    Fault(faulty_options.AnotherResultCompiled, "composition", "CMP-1"),
    Fault(faulty_options.MaskForgottenCompiled, "composition", "CMP-1", by="compiled_mask_agrees"),
    Fault(faulty_options.ReadsItself, "composition", "CMP-2", shown=False),
    Fault(faulty_options.AnotherScaleExported, "composition", "CMP-2", by="exported_program_agrees", shown=False),
    Fault(
        faulty_options.MaskForgottenExported,
        "composition",
        "CMP-2",
        by="exported_mask_agrees",
        shown=False,
    ),
    Fault(faulty_options.ReadsItself, "composition", "CMP-3", shown=False),
    Fault(faulty_state.WeightsCopied, "composition", "CMP-3", shown=False),
    Fault(faulty_options.AnotherScaleUnderAutocast, "composition", "CMP-4"),
    Fault(faulty_options.ForgetsTheFirst, "composition", "INC-1", shown=False),
    Fault(faulty_options.DecodesOneBehind, "composition", "INC-1", by="decoding_equals_one_causal_pass", shown=False),
    Fault(
        faulty_options.FirstGroupDecoded,
        "composition",
        "INC-1",
        by="grouped_decoding_equals_one_causal_pass",
        shown=False,
    ),
    Fault(faulty_options.GroupsTiled, "composition", "GQA-1", by="grouped_heads_equal_repeated_ones"),
    Fault(faulty_options.GroupsDetached, "composition", "GQA-1", by="grouped_heads_have_gradients"),
    Fault(faulty_options.WidthsExchanged, "composition", "XAT-1", by="other_widths_match_the_oracle"),
    Fault(faulty_options.WideKeyCut, "composition", "XAT-1", by="other_widths_match_the_oracle"),
    Fault(faulty_options.NarrowValueDetached, "composition", "XAT-1", by="other_widths_have_gradients"),
    Fault(faulty.MeanOfValues, "cheats", "SMX-2"),
    Fault(faulty.RepeatsItself, "cheats", "EQV-2"),
)
