"""What faults are diagnosed as: `python -m support.diagnoses [FAULT ...]` prints it.

A fault is named if the first finding on it is its diagnosis, or else a clause that must catch it,
unless that clause is one that almost any defect violates and the message is about numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from time import process_time

import torch

from mha.conformance import Report, check
from mha.conformance.engine import judge
from mha.conformance.faults.fault import Fault
from mha.conformance.faults.registry import FAULTS
from mha.conformance.reports.summary import findings
from mha.conformance.results import Verdict
from mha.spec import CLAUSES

IGNORED, TRANSPOSED = (
    "the mask is ignored",
    "the mask is applied to the queries instead of the keys",
)
NAN, UNIFORM = (
    "a query without an allowed key is NaN",
    "a query without an allowed key attends to all keys equally",
)
TILES = "the keys after the last whole tile"
NOT_CAUSAL, OFF_BY_ONE = "the causal flag is ignored", "the causal mask is off by one"
AFTER_SOFTMAX, TOO_HIGH = (
    "masked weights are zeroed after the softmax",
    "masked scores get a finite number",
)
UNPROJECTED, AS_BOOLEAN = (
    "the output projection is missing",
    "the float mask is read as a boolean one",
)
# What a diagnosis of each fault begins with. No other fault has one.
EXPECTED: dict[str, str] = {
    "AddressTakenForInput": "the query is passed for key and value",
    "AnotherScaleInTraining": "the scores are 1.01 times what they should be, in training mode",
    "AnotherScaleWithWeights": "the output is 1.01 times",
    "AnotherScaleWithoutGradient": "the scores are 1.01 times",
    "AnyMaskAnotherScale": "the output is 1.01 times",
    "BatchEqualsHeads": "the mask has items and heads exchanged",
    "CausalExcludesItself": OFF_BY_ONE,
    "CausalForMoreKeys": OFF_BY_ONE,
    "CausalForgottenBesideMask": NOT_CAUSAL,
    "CausalFromTheLeft": "the causal mask is aligned at the other end",
    "CausalFromTheRight": "the causal mask is aligned at the other end",
    "CausalMaskOfFirstCall": "the mask of the first call with the same shapes",
    "CausalOffByOne": OFF_BY_ONE,
    "ColumnsInEights": "the columns of a head are read in eights",
    "DataInside": "no gradient reaches w_q, w_k and b_q",
    "DependsOnBatchSize": "the scores are 1.01 times",
    "DetachedKeys": "no gradient reaches",  # the key, where it is not another input too, and w_k
    "DropsKeyAfterTile": TILES,
    "Einops": f"the scores are not scaled, and {UNPROJECTED}",
    "EvaluationWithoutGradient": "the scores are 0.9 times",
    "FastPathOfSelfAttention": "the values are projected by W_k",
    "FillAboveLowScores": TOO_HIGH,
    "FiniteFill": UNIFORM,
    "FiniteMaskForgotten": "only the infinite entries of the float mask count",
    "FirstHeadForAll": "the first head's scores are used for all heads",
    "FlatMaskForgotten": IGNORED,
    "FloatMaskAsBoolean": AS_BOOLEAN,
    "FloatMaskScaled": "the float mask is added before the scores are scaled",
    "FusedQKV": TRANSPOSED,
    "GradientFarTooLarge": "all gradients are 1.05 times",
    "GradientTooLarge": "all gradients are 1.001 times",
    "GroupedWideCut": "only the first 16 columns of a head enter the scores",
    "GroupsTiled": "the key/value heads are tiled",
    "HeadMaskIgnoredWithoutQueries": IGNORED,
    "HeadRemainderOf128Dropped": "only the first 128 columns of a head",
    "HeadRemainderOf256Dropped": "only the first 256 columns of a head",
    "HeadsAveraged": "each head's context is the mean over all heads",
    "HeadsByViewAlone": "the heads are split by `view` alone",
    "HeadsInterleaved": "the heads have their columns interleaved",
    "HeadsReversed": "the heads are concatenated in reverse order",
    "HintOverridesMask": IGNORED,
    "InferenceMode": IGNORED,
    "IntegerMaskAdded": "the boolean mask is added to the scores, as 1 where it is true",
    "JoinedByEither": "mask and causal flag are joined by `or`",
    "KeyAndValueSwapped": "key and value are exchanged",
    "LastKeyNeverMasked": "the last key cannot be masked",
    "Lukewarm": "the scores are 0.990099 times",
    "MaskAddedAfterSoftmax": AFTER_SOFTMAX,
    "MaskAfterSoftmax": AFTER_SOFTMAX,
    "MaskGradientDropped": "no gradient reaches the mask",
    "MaskIgnored": IGNORED,
    "MaskOfFirstHead": "the mask of the first head counts for all",
    "MaskOfFirstItem": "the mask of the first item counts for all",
    "MaskOfFirstQuery": "the mask of the first query counts for all",
    "MaskOfFirstTile": "the mask is applied to the first 16 keys only",
    "MaskOnQueries": TRANSPOSED,
    "MeanOfValues": "queries and keys do not count",
    "Minimal": NAN,
    "Modular": "the scores are scaled by 1/sqrt(d_k) rounded to float32",
    "NanForEmptyRowsInFastPath": NAN,
    "NanInEmptyRow": NAN,
    "NoGradInside": "no gradient reaches the value, w_v and b_v",
    "OddWidth": "the last column of a head of odd width",
    "OneHeadLeftOut": "the last head is left out",
    "OneHeadNotProjected": UNPROJECTED,
    "OneQueryNotCausal": NOT_CAUSAL,
    "OutputBiasDropped": "the bias of the output projection is missing",
    "OutputWeightForgottenInHalf": "no gradient reaches any input or weight",
    "OutputNotProjected": UNPROJECTED,
    "OutputProjectedTransposed": "the matrix of the output projection is transposed",
    "PaddingForgottenUnderCausal": IGNORED,
    "PolarityReversed": "the mask is read the other way round",
    "QueriesEqualKeys": TRANSPOSED,
    "QueryAndKeySwapped": "the query is projected by W_k and the key by W_q",
    "QueryBiasDropped": "the bias of the query projection is missing",
    "RepeatsItself": "the output of the first call with the same shapes",
    "ProductsInTF32": "products with keys and values are in TF32",
    "ScaleInSinglePrecision": "the scores are scaled by 1/sqrt(d_k) rounded to float32",
    "ScaledByHeadWidth": "the scores are scaled by 1/d_k",
    "ScaledByModelWidth": "the scores are scaled by 1/sqrt(d_model)",
    "ScoresInHalf": "the scores are rounded to float16",
    "SigmoidOfTheOnlyScore": (
        "1 is added to the denominator of the softmax"
    ),  # which is the same for a single key
    "SingleItem": NOT_CAUSAL,
    "SingleQuery": IGNORED,
    "Sink": "1 is added to the denominator of the softmax",
    "SixtyFourColumns": "only the first 64 columns of a head",
    "SmallConstantInDenominator": "the weights are 0.999001 times",
    "SoftmaxInBfloat16": "the softmax is computed in bfloat16",
    "SoftmaxOverHeads": "the softmax runs over the heads",
    "SoftmaxOverQueries": "the softmax runs over the queries",
    "ThreeHeads": "the scores are 0.9 times",
    "TileRemainderDropped": TILES,
    "TileRemainderOf32Dropped": TILES,
    "TileRemainderOf64Dropped": TILES,
    "TileRemainderOf128Dropped": TILES,
    "TiresOfAll": "the scores are 1.1 times",  # as they are after twenty calls
    "UnguardedPaddingOfNumbers": NAN,
    "Unscaled": "the scores are not scaled",
    "ValueBiasDropped": "the bias of the value projection is missing",
    "ValueByKeyProjection": "the value is projected by W_k",
    "ValuesSplitByViewAlone": "the values are split by `view` alone",
    "Vectorized": UNIFORM,
    "WideHeadsDetached": "no gradient reaches",
    "WideHeadsDetachedInHalf": "no gradient reaches",
    "WeightsTooLarge": "the weights are 1.01 times",
    "WeightsUnderCausal": NOT_CAUSAL,
    "Zeros": "the output is zero",
}
# What fails beside the clause that must catch a fault, and used to come first.
BESIDE = ("CFG-4", "SMX-2", "SMX-4", "HED-1", "EQV-9", "NUM-1")


@dataclass(frozen=True)
class Diagnosis:
    """How a fault is found; seconds: of the run, diagnosing: of finding the cause."""

    fault: str
    clauses: frozenset[str]
    report: Report
    seconds: float
    diagnosing: float

    @property
    def texts(self) -> set[str]:
        """The diagnoses, of any clause."""
        return {verdict.diagnosis for verdict in self.report.verdicts} - {""}

    @property
    def wrong(self) -> set[str]:
        """The diagnoses that are not the fault's own."""
        expected = EXPECTED.get(self.fault)
        return {text for text in self.texts if expected is None or not text.startswith(expected)}

    @property
    def leading(self) -> Verdict:
        """The verdict that comes first."""
        return findings(
            verdict for verdict in self.report.verdicts if verdict.status in ("fail", "refused")
        )[0][0]

    @property
    def first(self) -> str:
        """The first finding: a diagnosis, or a clause."""
        return self.leading.diagnosis or self.leading.clause

    @property
    def named(self) -> bool:
        """Whether the first finding names the fault."""
        first = self.leading
        if first.diagnosis:
            return first.diagnosis not in self.wrong
        said = " raised " in first.message or " has no " in first.message
        return first.clause in self.clauses and (not CLAUSES[first.clause].general or said)


def diagnosed(faults: Collection[Fault], beside: Collection[str] = BESIDE) -> Iterator[Diagnosis]:
    """Judge faults by the clauses that must catch each, and by others."""
    cells: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        cells.setdefault((fault.name, fault.dtype), []).append(fault)
    for (name, dtype), members in cells.items():
        own = frozenset(fault.clause for fault in members)
        start, spent = process_time(), 0.0
        diagnose = judge.diagnose

        def timed(*given, diagnose=diagnose):
            nonlocal spent
            before = process_time()
            found = diagnose(*given)
            spent += process_time() - before
            return found

        judge.diagnose = timed
        try:
            report = check(
                members[0].implementation, "quick", clauses=own | set(beside), dtypes=[dtype]
            )
        finally:
            judge.diagnose = diagnose
        yield Diagnosis(name, own, report, process_time() - start, spent)


def main(names: Collection[str]) -> None:
    """Print how each fault, or each of those named, is diagnosed, and the totals."""
    torch.set_num_threads(1)
    total = named = 0
    seconds = diagnosing = 0.0
    wrong: list[str] = []
    for each in diagnosed([fault for fault in FAULTS if not names or fault.name in names]):
        if not any(verdict.status in ("fail", "refused") for verdict in each.report.verdicts):
            print(f"{each.fault:32} not caught in the quick profile", flush=True)
            continue
        total, named = total + 1, named + each.named
        seconds, diagnosing = seconds + each.seconds, diagnosing + each.diagnosing
        wrong += [f"{each.fault}: {text}" for text in each.wrong]
        mark = "named" if each.named else "-"
        cost = f"{each.diagnosing:.1f} of {each.seconds:.1f} s"
        print(
            f"{each.fault:32} {mark:6} {cost:14} {each.first}{' WRONG' * bool(each.wrong)}",
            flush=True,
        )
    print(
        f"named {named} of {total}; diagnosing took {diagnosing:.0f} of {seconds:.0f} s; wrong:"
        f" {wrong}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
