"""The diagnosis names the defect of a fault if one is known, and changes no verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mha.conformance import Report, Verdict, check
from mha.conformance.engine import judge
from mha.conformance.faults.base import Complete, Correct, implementation_of
from mha.conformance.faults.registry import FAULTS, implementations
from mha.conformance.faults.softmax import Unscaled
from mha.conformance.harness.known_bad.advice import ADVICE, fix_of, subject_of
from mha.conformance.harness.known_bad.catalogue import (
    NAMED,
    contexts_times,
    outputs_times,
    pairs,
    scale_of,
    scores_times,
    sums_times,
)
from mha.conformance.harness.known_bad.sources import SOURCES, seen_in
from mha.conformance.reports.github import workflow_commands
from mha.conformance.reports.html import to_html
from mha.conformance.reports.markdown import to_markdown
from mha.conformance.reports.summary import cause_of, findings
from mha.conformance.reports.text import describe, summarise
from mha.implementations import from_kernel
from mha.spec import CLAUSES, Claims, Options, Output
from support.diagnoses import EXPECTED, diagnosed
from support.planted import PLANTED, MaskOfNextItem, TriangleOffByOne
from support.reports_made import report, verdict

# One or more of each module of the catalogue, with conditions, a fitted number, two defects at
# once, and float64.
SAMPLE = (
    "ScaledByModelWidth",
    "EvaluationWithoutGradient",
    "PolarityReversed",
    "MaskOfFirstHead",
    "SingleQuery",
    "CausalForgottenBesideMask",
    "Vectorized",
    "OutputBiasDropped",
    "HeadsInterleaved",
    "TileRemainderDropped",
    "RepeatsItself",
    "Einops",
    "ScaleInSinglePrecision",
    "ProductsInTF32",
    "NoGradInside",
    "GradientTooLarge",
    "WideHeadsDetached",
)
# Faults that the catalogue does not have, some of them close to one that it has.
OUTSIDE = (
    "FirstKeyNeverMasked",
    "MoreQueriesThanKeys",
    "LaterKeysFavoured",
    "ScoresClamped",
    "RunningMaximumNotRescaled",
    "WideContextCut",
)


@pytest.mark.mostly_slow(5)
@pytest.mark.parametrize("name", SAMPLE)
def test_first_finding_names_the_defect(name: str) -> None:
    for each in diagnosed([fault for fault in FAULTS if fault.name == name], beside=()):
        assert each.first.startswith(EXPECTED[name])
        assert each.named
        assert not each.wrong


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("name", OUTSIDE)
def test_defect_outside_of_the_catalogue_has_no_diagnosis(name: str) -> None:
    for each in diagnosed([fault for fault in FAULTS if fault.name == name], beside=("HED-1",)):
        assert each.report.exit_status == 1
        assert not each.texts


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("cls", PLANTED, ids=lambda cls: cls.__name__)
def test_clauses_that_fail_in_consequence_have_one_diagnosis(cls: type) -> None:
    text, clauses = PLANTED[cls]
    failed = check(implementation_of(cls), "quick", clauses=clauses, dtypes=["float32"])
    found = [(verdict.clause, verdict.diagnosis) for verdict in failed.verdicts]
    assert found == [(clause, text) for clause in CLAUSES if clause in clauses]
    assert {verdict.fix for verdict in failed.verdicts} == {fix_of(text)}


@pytest.mark.slow
def test_planted_defect_outside_of_the_catalogue_has_no_diagnosis() -> None:
    failed = check(
        implementation_of(MaskOfNextItem),
        "quick",
        clauses=["MSK-1", "MSK-6", "STA-3"],
        dtypes=["float32"],
    )
    assert {(verdict.status, verdict.diagnosis, verdict.fix) for verdict in failed.verdicts} == {
        ("fail", "", "")
    }


def test_failure_of_the_formula_without_a_defect_is_of_no_defect() -> None:
    """MSK-10 and MSK-12 fail for the textbook's formula too, whatever else is wrong."""
    failed = check(
        implementation_of(TriangleOffByOne),
        "quick",
        clauses=["CAU-1", "MSK-10"],
        dtypes=["float32"],
    )
    found = {verdict.clause: (verdict.status, verdict.diagnosis) for verdict in failed.verdicts}
    assert found["CAU-1"] == ("fail", PLANTED[TriangleOffByOne][0])
    assert found["MSK-10"] == ("fail", "")


def test_empty_row_that_got_something_does_not_accuse_the_batch() -> None:
    """Such a row has an exact answer; the rounding of another is no influence of the batch."""
    claims = replace(Claims(), causal="bottom_right")  # `Correct` is aligned at the top left
    implementation = implementation_of(Correct, claims)
    failed = check(implementation, "quick", clauses=["CAU-3", "EQV-1"], dtypes=["float32"])
    found = {verdict.clause: (verdict.status, verdict.diagnosis) for verdict in failed.verdicts}
    assert found == {
        "CAU-3": ("fail", "the causal mask is aligned at the other end"),
        "EQV-1": ("pass", ""),
    }


def test_general_clauses_come_after_the_cause_and_are_of_it() -> None:
    failed = check(
        implementations["Unscaled"],
        "quick",
        clauses=["CFG-4", "SMX-6", "HED-1"],
        dtypes=["float32"],
    )
    (found,) = findings(failed.verdicts)
    assert (
        cause_of(found) == "the scores are not scaled (one cause, 3 clauses: SMX-6, CFG-4, HED-1)"
    )


def without_diagnosis(report: Report) -> list[Verdict]:
    """Return the verdicts of a report without what a diagnosis adds to them."""
    added = {"diagnosis": "", "fix": "", "steps": "", "seconds": 0.0}
    return [replace(verdict, **added) for verdict in report.verdicts]


@pytest.mark.slow
def test_diagnosis_changes_no_other_field(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"profile": "quick", "clauses": ["SMX-6", "EQV-1", "EQV-2"], "dtypes": ["float32"]}
    for name in ("Unscaled", "SecondCall"):
        with_diagnosis = check(implementations[name], **options)
        monkeypatch.setattr(judge, "diagnose", lambda *_: "")
        without = check(implementations[name], **options)
        monkeypatch.undo()
        assert without_diagnosis(with_diagnosis) == without_diagnosis(without)


@pytest.mark.slow
def test_calls_that_should_be_refused_or_are_empty_are_no_evidence() -> None:
    for name in ("Zeros", "NoValidation", "MaskCropped"):
        failed = check(
            implementations[name], "quick", clauses=["SHP-5", "SHP-6", "MSK-12"], dtypes=["float32"]
        )
        assert {verdict.status for verdict in failed.verdicts} <= {"pass", "fail", "blocked"}


@pytest.mark.slow
def test_nan_alone_names_no_defect_under_a_condition() -> None:
    class NanForMasksOfAnotherPrecision(Complete):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
            spoilt, mask = False, options.mask
            if mask is not None and mask.is_floating_point() and mask.dtype != query.dtype:
                options, spoilt = options.change(mask=mask.to(query)), self.config.head_dim > 8
            output, weights, _ = super().attend(query, key, value, options)
            return Output(output * torch.nan if spoilt else output, weights)

    implementation = implementation_of(NanForMasksOfAnotherPrecision)
    (verdict,) = check(implementation, "quick", clauses=["MSK-14"], dtypes=["float16"]).verdicts
    assert "a torch.float32 mask is added" in verdict.message
    assert not verdict.diagnosis


def test_sources_are_of_faults_and_of_defects() -> None:
    known = {fault.source for fault in FAULTS}
    texts = [each.text for group in NAMED for each in group]
    for text in SOURCES:
        assert seen_in(text) in known
        assert any(each.startswith(text) for each in texts)
    assert seen_in("something else") == ""


def longest_advice(text: str) -> str:
    """Return the longest beginning of a diagnosis that advice is given for."""
    beginnings = (begins for begins in ADVICE if text.startswith(begins))
    return max(beginnings, key=len, default="")


GRADIENTS = (
    "no gradient reaches w_q",
    "all gradients are 2 times",
    "the gradient of w_q is 2 times",
)


def test_each_diagnosis_has_a_clause_and_a_fix() -> None:
    fitted = [
        made(3.0) for made in (scores_times, outputs_times, sums_times, contexts_times, scale_of)
    ]
    named = [*(each for group in NAMED for each in group), *pairs(), *fitted]
    texts = {text for each in named for text in (each.text, each.family) if text} | set(GRADIENTS)
    assert {text for text in texts if subject_of(text) not in CLAUSES} == set()
    assert {text for text in texts if not fix_of(text)} == set()
    used = set(map(longest_advice, texts))
    assert set(ADVICE) - used == {
        "only the first columns"
    }  # which stands for each number of columns


def test_fix_of_two_defects_names_both() -> None:
    text = "the scores are not scaled, and the output projection is missing"
    assert (
        fix_of(text)
        == f"{fix_of('the scores are not scaled')} {fix_of('the output projection is missing')}"
    )
    assert subject_of(text) == "SMX-6"
    assert subject_of("only the first 64 columns of a head enter the scores") == "SMX-6"
    assert subject_of("only the first 64 keys count") == "NUM-5"
    assert (subject_of("something else"), fix_of("something else")) == ("", "")


def test_defects_have_names_of_their_own() -> None:
    names = [each.name for group in (*NAMED, pairs()) for each in group]
    assert len(names) == len(set(names))
    assert set(EXPECTED) <= {fault.name for fault in FAULTS}


class UnscaledWithHalfTheWeights(Unscaled):
    """Two defects: the scores are not scaled, and half of the weights is returned."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Output:
        output, weights, _ = super().forward(query, key, value, mask, is_causal)
        return Output(output, weights / 2)


def test_failure_that_the_defect_does_not_lead_to_is_not_of_its_cause() -> None:
    implementation = implementation_of(UnscaledWithHalfTheWeights)
    failed = check(implementation, "quick", clauses=["SMX-1", "SMX-6", "HED-1"], dtypes=["float32"])
    assert [verdict.diagnosis for verdict in failed.verdicts] == ["", CAUSE, CAUSE]


def test_specific_clause_comes_before_general_ones() -> None:
    failed = [verdict("mine", clause, "fail") for clause in ("CFG-4", "SMX-2", "MSK-6", "HED-1")]
    assert [found[0].clause for found in findings(failed)] == ["MSK-6", "CFG-4", "SMX-2", "HED-1"]


CAUSE = "the scores are not scaled"
FAILED = report(
    verdict("mine", "HED-1", "fail", diagnosis=CAUSE),
    verdict("mine", "MSK-8", "fail"),
    verdict("mine", "SMX-6", "fail", diagnosis=CAUSE),
    verdict("mine", "SMX-6", "fail", dtype="float64", diagnosis=CAUSE),
)


def strictly_causal(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """A query does not see its own key, so that the first one gets NaN."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        earlier = torch.ones_like(scores, dtype=torch.bool).tril(-1)
        scores = scores.masked_fill(~earlier, -torch.inf)
    return scores.softmax(-1) @ v


def test_nan_is_not_explained_by_coarse_products() -> None:
    claims = Claims(masks=(), causal="top_left", returns_weights=False)
    kernel = from_kernel(strictly_causal, mask=None, claims=claims)
    (failed,) = check(kernel, "quick", clauses=["CAU-2"], dtypes=["float32"]).verdicts
    assert failed.status == "fail"
    assert "TF32" not in failed.diagnosis


def test_every_report_leads_with_the_cause_once() -> None:
    entry = f"{CAUSE} (one cause, 2 clauses: SMX-6, HED-1)"
    text = "\n".join(summarise(FAILED.verdicts, width=1000))
    assert text.count(f"SMX-6, HED-1 float32, float64: {CAUSE}") == 1
    assert text.index(CAUSE) < text.index("MSK-8")
    page = to_html(FAILED).partition('id="failures"')[2].partition("<dialog")[0]
    for shown, cause in ((to_markdown(FAILED), entry), (page, f">{CAUSE}</a>")):
        assert shown.count(cause) == 1
        assert shown.index(cause) < shown.index("MSK-8", shown.index(cause) - 1)
    assert "SMX-6" in next(iter(workflow_commands(FAILED)))
    assert f"diagnosis  {CAUSE}" in describe(FAILED.verdicts[0])
