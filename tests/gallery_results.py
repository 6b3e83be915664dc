"""Faults that give wrong results: arithmetic, heads, masks, sizes, layouts, shapes, configurations, cheats."""

from __future__ import annotations

from dataclasses import replace

import faulty_numbers
import faulty_paths
from complete import CLAIMS
from fault import Fault

import faulty

HALF = "bfloat16"
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
    Fault(faulty.MeanOfValues, "cheats", "SMX-2"),
    Fault(faulty.RepeatsItself, "cheats", "EQV-2"),
)
