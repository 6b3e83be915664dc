"""Several options on the scores at once (GRD-1), and other ones in the next call (STA-3)."""

from __future__ import annotations

from dataclasses import replace

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOUNDED, DENSE, WITH_GRADIENT
from mha.conformance.harness.assertions import assume
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.domains import NEEDS_OPTIONS, SEVERAL_OPTIONS
from mha.conformance.properties.support.shared_assertions import (
    assume_taken_together,
    expect_gradients,
    expect_result,
    result_together,
)
from mha.spec import Problem
from mha.spec.scores import Bounds


@property_of(
    "GRD-1",
    replace(SEVERAL_OPTIONS, modes=WITH_GRADIENT, dtypes=BOUNDED, need_weights=(False,)),
    needs=("gradients", NEEDS_OPTIONS),
    requires="HED-1",
    must_reject=("nan_gradients", "lopsided"),
    max_cases=24,
    number=13,
)
def gradients_go_with_several_options(session: Session, case: Case) -> None:
    """With several options on the scores at once the gradients are within the bound."""
    problem = case.problem()
    several = len(problem.options.of_scores) + (case.variant != "plain") > 1
    assume(several, "the call has one option, of which another clause is")
    assume_taken_together(session, problem)
    expect_gradients(session, problem, None, "by the oracle's formulas, with all of these options")


@property_of(
    "STA-3",
    replace(SEVERAL_OPTIONS, layouts=DENSE),
    needs=NEEDS_OPTIONS,
    requires="HED-1",
    must_reject=("haunted",),
    max_cases=20,
    number=7,
)
def options_of_an_earlier_call_are_forgotten(session: Session, case: Case) -> None:
    """After a call with other options and numbers, one is right with its own, and with none.

    An attention may keep masks, slopes or sinks from call to call, but by all that makes them.
    """
    problem = case.problem()
    assume(bool(problem.options.of_scores), "the call has no options")
    other = problem.map_inputs(lambda x: x.flip(1) + 1)
    result_together(session, _with_other_values(session, other))
    expect_result(
        result_together(session, problem),
        session.expected(problem),
        "the oracle's value, after a call with other options",
    )
    plain = problem.change(**dict.fromkeys(problem.options.of_scores))
    expect_result(
        result_together(session, plain),
        session.expected(plain),
        "the oracle's value without options, after calls with some",
    )


def _with_other_values(session: Session, problem: Problem) -> Problem:
    """Return a problem that has the options of another one, with other values."""
    options, declared = problem.options, session.claims.scores
    changed: dict[str, object] = {}
    if options.scale is not None:
        changed["scale"] = 2 * options.scale
    if options.window is not None and declared.window is not None:
        changed["window"] = declared.window.nearest(_wider(options.window))
    if options.chunk is not None:
        changed["chunk"] = options.chunk + 1
    if options.softcap is not None:
        changed["softcap"] = 2 * options.softcap
    if options.sinks is not None:
        changed["sinks"] = tuple(sink + 1 for sink in options.sinks)
    if options.alibi is not None and declared.alibi is not None and not declared.alibi.built_in:
        changed["alibi"] = options.alibi[::-1]
    return problem.change(**changed)


def _wider(window: Bounds) -> Bounds:
    """Return a window with one more key on the left, or on the right if it has all on the left."""
    left, right = window
    if left is not None:
        return left + 1, right
    return left, None if right is None else right + 1
