"""SCL: an explicit scale."""

from __future__ import annotations

from dataclasses import replace

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.mask_kinds import COMMON
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.domains import SEVERAL_OPTIONS
from mha.conformance.properties.support.shared_assertions import (
    assume_answered,
    expect_gradients,
    expect_result,
    expect_together,
)

PLAIN = Domain(masks=COMMON, causal=BOTH, values=MODERATE)
SCALED = replace(PLAIN, scales=(0.5, 2.0, 3.0, 0.0, -1.0))


@property_of(
    "SCL-1",
    SCALED,
    needs="scores.scale",
    requires="HED-1",
    must_reject=("ignores_scale", "lopsided"),
)
def an_explicit_scale_is_the_scale(session: Session, case: Case) -> None:
    """With an explicit scale the result is within the bound of the oracle's for that scale."""
    problem = case.problem()
    assume_answered(session, problem)
    because = f"the oracle's value, with scores that are multiplied by {problem.options.scale!r}"
    expect_result(session(problem), session.expected(problem), because)


@property_of(
    "SCL-1",
    PLAIN,
    needs="scores.scale",
    requires="HED-1",
    must_reject=("lopsided",),
    max_cases=20,
    number=2,
)
def the_usual_scale_changes_nothing(session: Session, case: Case) -> None:
    """The usual scale, given explicitly, gives the oracle's value."""
    problem = case.problem(scale=session.claims.scale_for(case.head_dim))
    assume_answered(session, problem)
    expect_result(
        session(problem), session.expected(problem), "the oracle's value, with the usual scale"
    )


@property_of(
    "SCL-1",
    replace(SCALED, modes=WITH_GRADIENT, dtypes=("float32", "float64")),
    needs=("scores.scale", "gradients"),
    requires="HED-1",
    must_reject=("ignores_scale",),
    max_cases=20,
    number=3,
)
def gradients_have_the_explicit_scale(session: Session, case: Case) -> None:
    """With an explicit scale the gradients are within the bound of the oracle's."""
    expect_gradients(
        session, case.problem(), None, "by the oracle's formulas, with the explicit scale"
    )


@property_of(
    "SCL-1",
    replace(SEVERAL_OPTIONS, values=(*MODERATE, "large"), scales=(0.5, 2.0, 3.0, -1.0)),
    needs=(
        "scores.scale",
        "scores.window|scores.softcap|scores.sinks|scores.alibi|scores.chunk|grouped_query",
    ),
    requires="SCL-1",
    must_reject=("ignores_scale", "lopsided"),
    max_cases=24,
    number=4,
)
def a_scale_goes_with_other_options(session: Session, case: Case) -> None:
    """With a scale beside other options or grouped heads the result is within the bound."""
    expect_together(session, case.problem())
