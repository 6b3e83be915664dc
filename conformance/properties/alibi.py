"""ALB: a bias that grows with the distance of a key."""

from __future__ import annotations

from dataclasses import replace

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.mask_kinds import BOOLEAN, COMMON, FLOAT
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.shared_assertions import (
    assume_answered,
    expect_effect,
    expect_gradients,
    expect_result,
    expect_together,
    options_refused_without_causal,
)

SLOPED = Domain(
    masks=("none", *BOOLEAN, *FLOAT),
    causal=BOTH,
    values=(*MODERATE, "large"),
    slopes=("falling", "equal", "mixed"),
)


@property_of(
    "ALB-1",
    SLOPED,
    needs="scores.alibi",
    requires="HED-1",
    must_reject=("ignores_slopes", "lopsided"),
)
def alibi_is_the_float_mask_of_its_slopes(session: Session, case: Case) -> None:
    """With slopes the result is within the bound, beside masks and the causal flag."""
    problem = case.problem()
    assume_answered(session, problem)
    with options_refused_without_causal(session, problem):
        result = session(problem)
    because = "the oracle's value, with the bias of the slopes"
    expect_result(result, session.expected(problem), because)


@property_of(
    "ALB-1",
    replace(
        SLOPED,
        masks=COMMON,
        windows=(None, (2, 0), (0, 1)),
        softcaps=(None, 1.0),
        scales=(None, 2.0),
        variants=("plain", "grouped"),
        min_heads=2,
    ),
    needs="scores.alibi",
    requires="ALB-1",
    must_reject=("ignores_slopes", "lopsided"),
    max_cases=20,
    number=2,
)
def alibi_goes_with_other_options(session: Session, case: Case) -> None:
    """With slopes beside other options or grouped heads the result is within the bound."""
    expect_together(session, case.problem())


@property_of(
    "ALB-1",
    replace(SLOPED, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs=("scores.alibi", "gradients"),
    requires="ALB-1",
    must_reject=("ignores_slopes", "nan_gradients"),
    max_cases=20,
    number=3,
)
def gradients_have_the_slopes(session: Session, case: Case) -> None:
    """With slopes the gradients are within the bound."""
    problem, because = case.problem(), "by the oracle's formulas, with the bias of the slopes"
    with options_refused_without_causal(session, problem):
        expect_gradients(session, problem, None, because)


@property_of(
    "EFF-1",
    Domain(masks=("none",), causal=BOTH, values=MODERATE, slopes=("falling", "mixed"), min_S=3),
    needs="scores.alibi",
    requires="HED-1",
    must_reject=("ignores_slopes",),
    max_cases=20,
    number=5,
)
def slopes_have_an_effect(session: Session, case: Case) -> None:
    """Where slopes change the exact result by ten times the bound, the result changes too."""
    expect_effect(session, case.problem(), "alibi")


@property_of(
    "ALB-1",
    replace(SLOPED, masks=COMMON, slopes=("items",), min_B=2),
    needs="scores.alibi.per_item",
    requires="ALB-1",
    must_reject=("ignores_slopes",),
    max_cases=20,
    number=4,
)
def each_item_has_its_slopes(session: Session, case: Case) -> None:
    """With other slopes for each item the result is within the bound."""
    alibi_is_the_float_mask_of_its_slopes(session, case)


@property_of(
    "ALB-2",
    Domain(
        causal=BOTH,
        values=MODERATE,
        slopes=("built_in",),
        scale="wide",
        # Powers of two, and others, among them numbers of heads of known models.
        sizes={
            "n_heads": (3, 5, 12, 2, 6, 7, 9, 16, 1, 24, 40),
            "head_dim": (8,),
            "B": (1, 2),
            "L": (7, 33),
            "S": (33, 7),
        },
    ),
    needs="scores.alibi.built_in",
    requires="HED-1",
    must_reject=("geometric_slopes", "ignores_slopes"),
    max_cases=24,
)
def built_in_slopes_are_the_usual_ones(session: Session, case: Case) -> None:
    """For any number of heads the result is within the bound, with the usual slopes."""
    alibi_is_the_float_mask_of_its_slopes(session, case)
