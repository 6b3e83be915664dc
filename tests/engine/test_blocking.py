"""Where a plain call fails, the clauses that build on it are blocked, and not shrunk."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.conformance import Report, Waiver, check
from mha.conformance.faults import registry as faults
from mha.conformance.reports.text import describe, summarise
from mha.spec import CLAUSES, Output

SAMPLE = [
    "CFG-1",
    "SHP-1",
    "SHP-2",
    "SHP-3",
    "SMX-2",
    "MSK-1",
    "CAU-2",
    "NUM-1",
    "GRD-1",
    "DRP-1",
    "STA-2",
]


class ExtraDimension(faults.Complete):
    """Every output has a dimension too many."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights, _ = super().attend(query, *rest)
        return Output(output.unsqueeze(1), weights)


class TruncatesLongOutputs(faults.Complete):
    """The output of more than three queries is one row short; the plain case has no more."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights, _ = super().attend(query, *rest)
        return Output(output[:, :-1] if query.shape[1] > 3 else output, weights)


class ScalesTwice(faults.Complete):
    """Every output has the expected shape, but incorrect values."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * 2


def judged(cls: type[faults.Complete], clauses: list[str]) -> Report:
    return check(faults.implementation_of(cls), clauses=clauses, dtypes=["float32"])


@pytest.fixture(scope="module")
def wrong_shape() -> Report:
    return judged(ExtraDimension, SAMPLE)


def test_a_wrong_shape_fails_only_the_clauses_of_shapes(wrong_shape: Report) -> None:
    statuses = {verdict.clause: verdict.status for verdict in wrong_shape.verdicts}
    assert statuses.pop("CFG-1") == "pass"
    shapes = {
        clause: statuses.pop(clause) for clause in list(statuses) if CLAUSES[clause].family == "SHP"
    }
    assert set(shapes.values()) == {"fail"}
    assert set(statuses.values()) == {"blocked"}
    assert not wrong_shape.conforms


def test_a_blocked_verdict_names_its_cause_and_is_not_shrunk(wrong_shape: Report) -> None:
    blocked = [verdict for verdict in wrong_shape.verdicts if verdict.status == "blocked"]
    assert {verdict.blocked_by for verdict in blocked} == {"SHP-1"}
    assert {verdict.examples for verdict in blocked} <= {0, 1, 2}
    assert all("in the plain case Case(" in verdict.message for verdict in blocked)
    text = describe(blocked[0])
    assert "blocked by SHP-1, which fails too" in text
    assert "To reproduce it" not in text


def test_the_root_cause_comes_first_in_a_summary(wrong_shape: Report) -> None:
    title, first, *_, blocked, judged, unjudged, quick, last = summarise(
        reversed(wrong_shape.verdicts), profile="quick"
    )
    assert title == "Wrong answers:"
    assert first.startswith("fail            SHP-1   float32: output")
    assert re.search(
        r"\n? *blocked by SHP-1 \(.+, which fails too\): STA-2, DRP-1, GRD-1, ", blocked
    )
    assert judged.startswith("    judged: ")
    assert unjudged == "    not judged: blocked by SHP-1 (7)"
    assert quick.startswith("    profile quick: ")
    said = (
        "DOES NOT CONFORM: 3 of 3 answers are wrong (SHP-1, SHP-2, SHP-3), 7 more cannot be judged"
        " before that is "
    )
    assert " ".join(last.split()).startswith(f"ExtraDimension: {said}mended.")


def test_a_wrong_shape_of_some_calls_blocks_the_clauses_that_make_them() -> None:
    report = judged(TruncatesLongOutputs, ["SHP-1", "NUM-1"])
    shape, value = report.verdicts
    assert (shape.status, value.status, value.blocked_by) == ("fail", "blocked", "SHP")
    assert "L=17" in str(shape.case)
    assert any("blocked by SHP" in line for line in summarise(report.verdicts))


def test_incorrect_values_block_only_the_clauses_that_need_correct_ones() -> None:
    report = judged(ScalesTwice, ["HED-1", "EQV-1", "DRP-1", "GRD-1", "SMX-6"])
    verdicts = {verdict.clause: (verdict.status, verdict.blocked_by) for verdict in report.verdicts}
    assert verdicts["HED-1"] == verdicts["SMX-6"] == ("fail", None)
    assert verdicts["EQV-1"] == ("pass", None)
    assert verdicts["DRP-1"] == verdicts["GRD-1"] == ("blocked", "HED-1")


def test_a_change_in_place_fails_the_clause_about_it_and_blocks_the_others() -> None:
    report = check(
        faults.implementations["ScalesQueryInPlace"], clauses=["SHP-1", "NUM-1", "STA-1"]
    )
    verdicts = {verdict.clause: (verdict.status, verdict.blocked_by) for verdict in report.verdicts}
    assert verdicts == {
        "SHP-1": ("blocked", "STA"),
        "NUM-1": ("blocked", "STA"),
        "STA-1": ("fail", None),
    }


def test_a_basic_clause_can_be_waived() -> None:
    waiver = Waiver(implementation="ExtraDimension", clause="SHP-1", reason="known")
    implementation = faults.implementation_of(ExtraDimension)
    report = check(implementation, clauses=["SHP-1"], dtypes=["float32"], waivers=[waiver])
    assert [verdict.status for verdict in report.verdicts] == ["waived"]


class Views(faults.Complete):
    """The queries are viewed, which raises unless they are contiguous."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        return super().attend(query.view(-1).view(query.shape), *rest)


class _HalvesStrided(torch.autograd.Function):
    """The inputs, and half of their gradients if they are not contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = 1.0 if x.is_contiguous() else 0.5
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.factor * gradients[0]


class HalfGradientsOfStrided(faults.Complete):
    """Outputs are right in any layout, and gradients of contiguous inputs alone."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        return super().attend(_HalvesStrided.apply(query), *rest)


def test_what_is_wrong_in_gradients_alone_is_not_blamed_on_outputs() -> None:
    layout, gradient = judged(HalfGradientsOfStrided, ["SHP-7", "GRD-1"]).verdicts
    assert layout.status == "pass"
    assert (gradient.status, gradient.blocked_by) == ("fail", None)
    assert "B=3" not in str(gradient.case)


@pytest.mark.slow
def test_inputs_that_must_be_contiguous_are_refused_by_one_clause_and_left_out_by_others() -> None:
    report = judged(Views, ["SHP-1", "SHP-7", "MSK-2", "NUM-1", "GRD-1"])
    (layout,) = (verdict for verdict in report.verdicts if verdict.clause == "SHP-7")
    others = [verdict for verdict in report.verdicts if verdict is not layout]
    assert (layout.status, layout.level, {verdict.status for verdict in others}) == (
        "fail",
        "SHOULD",
        {"pass"},
    )
    assert report.conforms
    assert judged(Views, ["NUM-1"]).conforms


class ViewsAndForgetsScale(Views):
    """Another fault shows on contiguous inputs."""

    scale = 1.0


def test_what_fails_on_contiguous_inputs_too_is_found() -> None:
    layout, numerics = judged(ViewsAndForgetsScale, ["SHP-7", "SMX-6"]).verdicts
    assert (layout.status, numerics.status) == ("fail", "fail")


class WideReadsOtherwise(faults.Complete):
    """Wide inputs alone are read wrongly if they are not contiguous, which SHP-7 does not try."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        wrong = query.shape[-1] > 150 and not query.is_contiguous()
        return super().attend(query * 1.5 if wrong else query, *rest)


def test_what_fails_by_its_layout_fails_where_the_clause_about_that_passes() -> None:
    layout, numerics = judged(WideReadsOtherwise, ["SHP-7", "NUM-1"]).verdicts
    assert (layout.clause, layout.status) == ("SHP-7", "pass")
    assert numerics.status == "fail"
