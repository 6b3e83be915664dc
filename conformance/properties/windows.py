"""WIN and EFF: windows, and whether what a call says has its effect."""

from __future__ import annotations

from dataclasses import replace

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, DENSE, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.mask_kinds import COMMON
from mha.conformance.harness.assertions import assume
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.domains import SEVERAL_OPTIONS
from mha.conformance.properties.support.shared_assertions import (
    assume_answered,
    expect_as_without,
    expect_effect,
    expect_gradients,
    expect_result,
    expect_together,
    options_refused_without_causal,
)
from mha.spec import Problem

# Of the query's own key, of a few keys, open on one side, and at and beside the edges of tiles.
BOUNDS = ((1, 0), (0, 0), (2, 1), (3, None), (None, 2), (0, 5), (16, 0), (15, 16), (17, 31))
WINDOWS = Domain(masks=COMMON, causal=BOTH, values=MODERATE, windows=BOUNDS)
# Longer than windows are wide, with more queries than keys as well as fewer.
LONGER = replace(WINDOWS, masks=("none", "padding"), scale="wide")


@property_of(
    "WIN-1",
    WINDOWS,
    needs="scores.window",
    requires="HED-1",
    must_reject=("ignores_window", "lopsided"),
)
def a_window_has_exactly_its_keys(session: Session, case: Case) -> None:
    """With a window the result is within the bound of the oracle's."""
    _expect_windowed(session, case.problem())


@property_of(
    "WIN-1",
    LONGER,
    needs="scores.window",
    requires="HED-1",
    must_reject=("ignores_window", "lopsided"),
    max_cases=12,
    number=2,
)
def a_window_moves_along_longer_sequences(session: Session, case: Case) -> None:
    """With a window narrower than the sequences the result is within the bound of the oracle's."""
    _expect_windowed(session, case.problem())


@property_of(
    "WIN-1",
    replace(SEVERAL_OPTIONS, windows=((2, 0), (0, 1), (1, 0))),
    needs=(
        "scores.window",
        "scores.scale|scores.softcap|scores.sinks|scores.alibi|scores.chunk|grouped_query",
    ),
    requires="HED-1",
    must_reject=("ignores_window", "lopsided"),
    max_cases=24,
    number=4,
)
def a_window_goes_with_other_options(session: Session, case: Case) -> None:
    """With a window beside other options or grouped heads the result is within the bound."""
    expect_together(session, case.problem())


def _expect_windowed(session: Session, problem: Problem) -> None:
    """Expect the oracle's value with the window of a problem."""
    assume_answered(session, problem)
    with options_refused_without_causal(session, problem):
        result = session(problem)
    left, right = problem.options.window or (None, None)
    before = "all" if left is None else left
    after = "all" if right is None else right
    because = (
        f"the oracle's value, with a window of {before} keys before a query's own, and {after}"
        " after it"
    )
    expect_result(result, session.expected(problem), because)


@property_of(
    "WIN-1",
    replace(WINDOWS, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs=("scores.window", "gradients"),
    requires="HED-1",
    must_reject=("ignores_window", "nan_gradients", "lopsided"),
    max_cases=20,
    number=3,
)
def gradients_have_the_window(session: Session, case: Case) -> None:
    """With a window the gradients are within the bound."""
    problem = case.problem()
    assume_answered(session, problem)
    with options_refused_without_causal(session, problem):
        expect_gradients(session, problem, None, "by the oracle's formulas, with the window")


@property_of(
    "WIN-2",
    replace(WINDOWS, windows=((1, 0), (None, None), (None, 2), (2, None))),
    needs="scores.window",
    requires="HED-1",
    must_reject=("lopsided", "unbounded_is_zero"),
    max_cases=20,
)
def a_window_of_everything_equals_none(session: Session, case: Case) -> None:
    """A window that covers all keys gives the result of a call without a window."""
    everything = case.L + case.S
    left, right = (None if bound is None else everything for bound in case.window or ())
    declared, alignment = session.claims.scores.window, session.claims.alignment
    assert declared is not None
    plain = case.problem(window=None)
    problem = plain.change(window=declared.nearest((left, right)))
    covers = torch.equal(problem.allowed(alignment), plain.allowed(alignment))
    assume(covers, "no argument of this form covers everything")
    assume_answered(session, problem)
    with options_refused_without_causal(session, problem):
        output = session(problem).output
    expect_as_without(session, output, plain, "a window")


@property_of(
    "WIN-2",
    replace(
        WINDOWS,
        masks=("padding", "blocks"),
        windows=((0, 0), (1, 0), (0, 1)),
        layouts=DENSE,
        min_S=3,
        min_L=3,
    ),
    needs="scores.window",
    requires="HED-1",
    must_reject=("ignores_window",),
    max_cases=20,
    number=2,
)
def a_window_of_masked_keys_is_an_empty_row(session: Session, case: Case) -> None:
    """A query whose window has only masked keys gets what is declared for an empty row."""
    problem = case.problem()
    assume_answered(session, problem)
    assume(
        bool(problem.empty_rows(session.claims.alignment).any()), "no window has masked keys only"
    )
    with options_refused_without_causal(session, problem):
        result = session(problem)
    expect_result(
        result, session.expected(problem), "the oracle's value, with rows that have no key"
    )


@property_of(
    "EFF-1",
    replace(WINDOWS, masks=("none",), min_L=2, min_S=3),
    needs="scores.window",
    requires="HED-1",
    must_reject=("ignores_window",),
    max_cases=20,
)
def a_window_has_an_effect(session: Session, case: Case) -> None:
    """Where a window changes the exact result by ten times the bound, the result changes too."""
    expect_effect(session, case.problem(), "window")


@property_of(
    "EFF-1",
    replace(WINDOWS, masks=("none",), windows=(None,), scales=(2.0, 0.5), min_S=3),
    needs="scores.scale",
    requires="HED-1",
    must_reject=("ignores_scale",),
    max_cases=20,
    number=2,
)
def a_scale_has_an_effect(session: Session, case: Case) -> None:
    """Where a scale changes the exact result by ten times the bound, the result changes too."""
    expect_effect(session, case.problem(), "scale")
