"""SNK: sinks, which take a part of the weight of each row."""

from __future__ import annotations

from dataclasses import replace

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.mask_kinds import BOOLEAN, COMMON, EMPTY, FLOAT
from mha.conformance.harness.assertions import assume, expect_close
from mha.conformance.harness.differentiation import differentiate
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.domains import SEVERAL_OPTIONS
from mha.conformance.properties.support.shared_assertions import (
    assume_answered,
    assume_taken_together,
    expect_as_without,
    expect_effect,
    expect_gradients,
    expect_result,
    expect_together,
)
from mha.spec import Problem

FINITE = ("mixed", "zeros", "high", "low")
SUNK = Domain(
    masks=("none", *BOOLEAN, *FLOAT, *EMPTY), causal=BOTH, values=(*MODERATE, "large"), sinks=FINITE
)


@property_of(
    "SNK-1", SUNK, needs="scores.sinks", requires="HED-1", must_reject=("ignores_sinks", "lopsided")
)
def a_sink_takes_part_in_the_denominator_only(session: Session, case: Case) -> None:
    """With sinks the result is within the bound of the oracle's, also in rows without a key."""
    problem = case.problem()
    expect_result(
        session(problem),
        session.expected(problem),
        "the oracle's value, with a sink in each denominator",
    )


@property_of(
    "SNK-1",
    replace(
        SUNK,
        masks=COMMON,
        windows=(None, (2, 0), (0, 1)),
        softcaps=(None, 1.0),
        scales=(None, 2.0),
        variants=("plain", "grouped"),
        min_heads=2,
    ),
    needs="scores.sinks",
    requires="SNK-1",
    must_reject=("ignores_sinks", "lopsided"),
    max_cases=24,
    number=2,
)
def a_sink_goes_with_other_options(session: Session, case: Case) -> None:
    """With sinks beside other options or grouped heads the result is within the bound."""
    expect_together(session, case.problem())


@property_of(
    "SNK-1",
    Domain(masks=COMMON, causal=BOTH, values=MODERATE, sinks=("infinite",)),
    needs="scores.sinks",
    requires="SNK-1",
    must_reject=("lopsided",),
    max_cases=20,
    number=3,
)
def a_sink_of_minus_infinity_is_none(session: Session, case: Case) -> None:
    """Sinks of -infinity give the result of a call without sinks."""
    problem = case.problem()
    plain = problem.change(sinks=None)
    assume_answered(session, plain)
    assume(
        not bool(plain.empty_rows(session.claims.alignment).any()),
        "a row has neither a key nor a sink",
    )
    output = session(problem).output
    expect_as_without(session, output, plain, "sinks")


@property_of(
    "SNK-2",
    replace(
        SUNK, masks=("none", *BOOLEAN), modes=WITH_GRADIENT, dtypes=BOUNDED, need_weights=(False,)
    ),
    needs=("scores.sinks", "gradients"),
    requires="SNK-1",
    must_reject=("ignores_sinks", "detached", "nan_gradients"),
    max_cases=30,
)
def gradients_have_the_sink(session: Session, case: Case) -> None:
    """With sinks the gradients of inputs and weights are within the bound."""
    expect_gradients(session, case.problem(), None, "by the oracle's formulas, with the sinks")


@property_of(
    "SNK-2",
    replace(
        SUNK, masks=("none", *BOOLEAN), modes=WITH_GRADIENT, dtypes=BOUNDED, need_weights=(False,)
    ),
    needs=("scores.sinks", "gradients"),
    requires="SNK-1",
    must_reject=("sinks_detached",),
    max_cases=30,
    number=2,
)
def a_sink_has_its_gradient(session: Session, case: Case) -> None:
    """The gradient of the sinks is within the bound, or sinks that require one are refused."""
    _expect_gradient_of_sinks(session, case.problem())


@property_of(
    "SNK-2",
    replace(
        SEVERAL_OPTIONS,
        sinks=FINITE,
        modes=WITH_GRADIENT,
        dtypes=BOUNDED,
        need_weights=(False,),
    ),
    needs=("scores.sinks", "gradients"),
    requires="SNK-1",
    must_reject=("sinks_detached",),
    max_cases=20,
    number=3,
)
def the_gradient_of_a_sink_goes_with_other_options(session: Session, case: Case) -> None:
    """Beside other options or grouped heads, the gradient of the sinks is within the bound."""
    problem = case.problem()
    assume_taken_together(session, problem)
    _expect_gradient_of_sinks(session, problem)


def _expect_gradient_of_sinks(session: Session, problem: Problem) -> None:
    """Expect the gradient of the sinks, unless sinks that require one are refused."""
    upstream = session.upstream(problem)
    dtype = problem.query.dtype if session.claims.scores.sinks == "input" else torch.float32
    sinks = torch.tensor(
        problem.options.sinks, dtype=dtype, device=problem.query.device, requires_grad=True
    )
    output = session.forward(problem.change(sinks=sinks))
    with guarded("backward()"):
        assume(output.requires_grad, "the output has no gradient")
        differentiate(output, upstream)
    found = torch.zeros_like(sinks) if sinks.grad is None else sinks.grad
    expected = session.expected_gradients(problem, upstream)["sinks"]
    # It is returned in the dtype of the sinks, in which it may underflow.
    limits = torch.finfo(dtype)
    rounded = limits.eps * expected.mid.abs() + limits.tiny
    expected = replace(expected, rad=expected.rad + rounded)
    because = "the gradient of the sinks, by the oracle's formula"
    expect_close(session.unscripted(found, "sinks.grad"), expected, because=because)


@property_of(
    "EFF-1",
    Domain(masks=("none",), causal=BOTH, values=MODERATE, sinks=("mixed", "high")),
    needs="scores.sinks",
    requires="HED-1",
    must_reject=("ignores_sinks",),
    max_cases=20,
    number=4,
)
def a_sink_has_an_effect(session: Session, case: Case) -> None:
    """Where sinks change the exact result by ten times the bound, the result changes too."""
    expect_effect(session, case.problem(), "sinks")


@property_of(
    "LSE-1",
    Domain(masks=("none", *BOOLEAN), causal=BOTH, values=MODERATE, sinks=FINITE, lse=(True,)),
    needs=("scores.sinks", "lse"),
    requires="SNK-1",
    must_reject=("ignores_sinks",),
    max_cases=20,
    number=2,
)
def the_log_sum_exp_has_the_sink_or_not(session: Session, case: Case) -> None:
    """With sinks the log-sum-exp has them as a term, or not, as it is declared to."""
    problem = case.problem()
    keyless = problem.change(sinks=None).empty_rows(session.claims.alignment)
    assume(not bool(keyless.any()), "a row has no key")
    result = session(problem, need_weights=False)
    assert result.lse is not None
    expect_close(
        result.lse, session.expected(problem).lse, because="the oracle's log-sum-exp, with sinks"
    )
