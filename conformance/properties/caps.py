"""CAP: scores that are capped by a hyperbolic tangent."""

from __future__ import annotations

from dataclasses import replace

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.mask_kinds import BOOLEAN, COMMON, EMPTY, FLOAT
from mha.conformance.harness.assertions import expect, expect_close
from mha.conformance.harness.errors import CallRaised
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.shared_assertions import (
    assume_answered,
    expect_effect,
    expect_gradients,
    expect_result,
    expect_together,
)

# At, and on both sides of, scores of ordinary size.
CAPS = (1.0, 0.5, 5.0, 30.0)
CAPPED = Domain(
    masks=("none", *BOOLEAN, *FLOAT, *EMPTY),
    causal=BOTH,
    values=(*MODERATE, "large"),
    softcaps=CAPS,
)
# Times the largest score that there may be.
FAR_ABOVE = 1e3


@property_of(
    "CAP-1",
    CAPPED,
    needs="scores.softcap",
    requires="HED-1",
    must_reject=("ignores_softcap", "lopsided"),
)
def a_softcap_acts_where_it_is_declared_to(session: Session, case: Case) -> None:
    """With a cap the result is within the bound, beside masks and the causal flag."""
    problem = case.problem()
    assume_answered(session, problem)
    because = f"the oracle's value, with scores that are capped at {case.softcap}"
    expect_result(session(problem), session.expected(problem), because)


@property_of(
    "CAP-1",
    replace(
        CAPPED,
        masks=COMMON,
        windows=(None, (2, 0), (0, 1)),
        scales=(None, 2.0),
        variants=("plain", "grouped"),
    ),
    needs="scores.softcap",
    requires="CAP-1",
    must_reject=("ignores_softcap", "lopsided"),
    max_cases=20,
    number=2,
)
def a_softcap_goes_with_other_options(session: Session, case: Case) -> None:
    """With a cap beside other options or grouped heads the result is within the bound."""
    expect_together(session, case.problem())


@property_of(
    "CAP-2",
    replace(CAPPED, masks=("none", *BOOLEAN, *FLOAT), modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs=("scores.softcap", "gradients"),
    requires="CAP-1",
    must_reject=("ignores_softcap", "softcap_without_gradient", "nan_gradients"),
    max_cases=30,
)
def gradients_have_the_factor_of_the_cap(session: Session, case: Case) -> None:
    """With a cap the gradients are within the bound: those of the scores times 1 - tanh^2."""
    expect_gradients(session, case.problem(), None, "by the oracle's formulas, with the cap")


@property_of(
    "CAP-3",
    Domain(masks=COMMON, causal=BOTH, values=MODERATE),
    needs="scores.softcap",
    requires="CAP-1",
    must_reject=("lopsided",),
    max_cases=20,
)
def a_cap_far_above_the_scores_is_right(session: Session, case: Case) -> None:
    """With a cap a thousand times the scores the result is within the bound."""
    plain = case.problem()
    assume_answered(session, plain)
    largest = 1.0
    if case.B * case.L * case.S:
        largest = float(session.expected(plain).max_score.nan_to_num().max())
    problem = plain.change(softcap=FAR_ABOVE * max(1.0, largest))
    because = "the oracle's value, with a cap far above the scores"
    expect_result(session(problem), session.expected(problem), because)


@property_of(
    "CAP-3",
    Domain(masks=COMMON, causal=BOTH, values=MODERATE, need_weights=(False,)),
    needs="scores.softcap",
    requires="CAP-1",
    must_reject=("lopsided",),
    max_cases=10,
    number=2,
)
def a_cap_of_zero_caps_nothing_or_is_refused(session: Session, case: Case) -> None:
    """A cap of 0 gives the result of a call without one, or raises."""
    plain = case.problem()
    assume_answered(session, plain)
    try:
        output = session(plain.change(softcap=0.0)).output
    except CallRaised:
        return
    expect_close(
        output,
        session.expected(plain).output,
        because="the oracle's value without a cap, since 0 is none",
    )


@property_of(
    "CAP-3",
    Domain(masks=COMMON, causal=BOTH, values=("large",), softcaps=(0.5, 1.0), min_head_dim=2),
    needs="scores.softcap",
    requires="CAP-1",
    must_reject=("ignores_softcap",),
    max_cases=20,
    number=3,
)
def scores_far_above_the_cap_give_finite_results(session: Session, case: Case) -> None:
    """Scores far above the cap give finite results, within the bound."""
    problem = case.problem()
    assume_answered(session, problem)
    output = session(problem).output
    expected = session.expected(problem).output
    finite = output.tensor.detach().isfinite().cpu() | ~expected.mid.isfinite()
    message = f"{output.code} is not finite, with scores far above the cap"
    expect(bool(torch.all(finite)), message, f"assert {output.code}.isfinite().all()")
    expect_close(output, expected, because="the oracle's value, with scores far above the cap")


@property_of(
    "EFF-1",
    Domain(masks=("none",), causal=BOTH, values=MODERATE, softcaps=(0.5, 1.0), min_S=3),
    needs="scores.softcap",
    requires="HED-1",
    must_reject=("ignores_softcap",),
    max_cases=20,
    number=3,
)
def a_softcap_has_an_effect(session: Session, case: Case) -> None:
    """Where a cap changes the exact result by ten times the bound, the result changes too."""
    expect_effect(session, case.problem(), "softcap")
