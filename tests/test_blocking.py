"""A basic fault is told once, at its root: what depends on it is blocked, not failed, and not shrunk."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from mha.conformance import Report, check
from mha.conformance.faults import registry as faults
from mha.conformance.reports.text import describe, summarise
from mha.spec import CLAUSES, Output

CLAUSES_OF_A_SAMPLE = [
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


class KeepsHeadsApart(faults.Complete):
    """The output has a dimension too many."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights = super().attend(query, *rest)
        return Output(output.unsqueeze(1), weights)


class LongQueriesSqueezed(faults.Complete):
    """The output of three queries has another shape; so has not that of the plainest case."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights = super().attend(query, *rest)
        return Output(output[:, :-1] if query.shape[1] > 3 else output, weights)


class OnlyScaledWrong(faults.Complete):
    """Every plain call is wrong, by a value."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * 2


def judged(cls: type[faults.Complete], clauses: list[str] = CLAUSES_OF_A_SAMPLE) -> Report:
    return check(faults.implementation_of(cls), clauses=clauses, dtypes=["float32"])


@pytest.fixture(scope="module")
def wrong_shape() -> Report:
    return judged(KeepsHeadsApart)


def test_wrong_shape_fails_the_clauses_of_shapes_alone(wrong_shape: Report) -> None:
    statuses = {verdict.clause: verdict.status for verdict in wrong_shape.verdicts}
    assert statuses.pop("CFG-1") == "pass"
    shapes = {clause: statuses.pop(clause) for clause in list(statuses) if CLAUSES[clause].family == "SHP"}
    assert set(shapes.values()) == {"fail"}
    assert set(statuses.values()) == {"blocked"}
    assert not wrong_shape.conforms


def test_what_is_blocked_says_by_what_and_has_nothing_to_shrink(wrong_shape: Report) -> None:
    blocked = [verdict for verdict in wrong_shape.verdicts if verdict.status == "blocked"]
    assert {verdict.blocked_by for verdict in blocked} == {"SHP-1"}
    assert {verdict.examples for verdict in blocked} <= {0, 1, 2}
    assert all("in the plain case Case(" in verdict.message for verdict in blocked)
    assert "blocked by SHP-1" in describe(blocked[0])


def test_root_cause_is_told_first(wrong_shape: Report) -> None:
    first, *rest = summarise(reversed(wrong_shape.verdicts))
    assert first.startswith("KeepsHeadsApart: DOES NOT CONFORM (3 fail, 7 blocked, 1 pass;")
    assert rest[0].strip().startswith("fail SHP-1 (float32 cpu): output_")
    assert "blocked by SHP-1: STA-2, DRP-1," in " ".join(line.strip() for line in rest)


def test_wrong_shape_of_some_calls_blocks_where_it_is_met_and_is_not_shrunk_there() -> None:
    report = judged(LongQueriesSqueezed, ["SHP-1", "NUM-1"])
    shape, value = report.verdicts
    assert (shape.status, value.status, value.blocked_by) == ("fail", "blocked", "SHP")
    assert "L=16" in str(shape.case)  # the smallest length that a boundary case has above 3
    assert any("blocked by SHP: NUM-1 could not be judged" in line for line in summarise(report.verdicts))


def test_wrong_value_blocks_what_compares_with_the_value_alone() -> None:
    report = judged(OnlyScaledWrong, ["HED-1", "EQV-1", "DRP-1", "GRD-1", "SMX-6"])
    found = {verdict.clause: (verdict.status, verdict.blocked_by) for verdict in report.verdicts}
    assert found["HED-1"] == found["SMX-6"] == ("fail", None)
    assert found["EQV-1"] == ("pass", None)
    assert found["DRP-1"] == found["GRD-1"] == ("blocked", "HED-1")


def test_change_in_place_is_told_by_the_clause_that_names_it() -> None:
    report = check(faults.implementations["ScalesQueryInPlace"], clauses=["SHP-1", "NUM-1", "STA-1"])
    found = {verdict.clause: (verdict.status, verdict.blocked_by) for verdict in report.verdicts}
    assert found == {"SHP-1": ("blocked", "STA"), "NUM-1": ("blocked", "STA"), "STA-1": ("fail", None)}


def test_a_waiver_is_heeded_where_a_basic_clause_fails() -> None:
    from mha.conformance.waivers import Waiver

    waiver = Waiver(implementation="KeepsHeadsApart", clause="SHP-1", reason="known")
    implementation = faults.implementation_of(KeepsHeadsApart)
    report = check(implementation, clauses=["SHP-1"], dtypes=["float32"], waivers=[waiver])
    assert [verdict.status for verdict in report.verdicts] == ["waived"]
