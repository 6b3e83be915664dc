"""LSE: the log-sum-exp of the scores, beside the context."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.mask_kinds import BOOLEAN, COMMON, EMPTY, FLOAT
from mha.conformance.cases.memory_layouts import leaf_of
from mha.conformance.harness.assertions import assume, expect_close
from mha.conformance.harness.differentiation import differentiate
from mha.conformance.harness.errors import Violation
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.recording import RecordedTensor
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.shared_assertions import (
    assume_answered,
    has_empty_row,
    input_gradients,
)
from mha.spec import Lse, Problem
from mha.spec.bounds import Ball

OF_ALL_MASKS = Domain(
    masks=("none", *BOOLEAN, *FLOAT, *EMPTY), causal=BOTH, values=(*MODERATE, "large"), lse=(True,)
)
# What a wrong log-sum-exp may be, made of the natural one, (B, H, L).
READINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "that to base 2": lambda natural: natural / math.log(2),
    "the natural one": lambda natural: natural,
    "the sum itself": torch.exp,
    "of the other sign": lambda natural: -natural,
}
# How near a wrong one is to a reading that names it.
NEAR = 0.02


@property_of(
    "LSE-1",
    replace(OF_ALL_MASKS, variants=("plain", "grouped")),
    needs="lse",
    requires="HED-1",
    must_reject=("lopsided", "lse_of_all_keys", "lse_of_the_rest"),
)
def the_log_sum_exp_is_that_of_the_scores(session: Session, case: Case) -> None:
    """The log-sum-exp is within the bound of the oracle's, and so is the context beside it."""
    _expect_lse(session, case.problem())


def _expect_lse(session: Session, problem: Problem) -> None:
    """Expect the oracle's log-sum-exp and output."""
    assume_answered(session, problem)
    result, expected = session(problem, need_weights=False), session.expected(problem)
    declared = session.claims.lse or Lse()
    assert result.lse is not None
    try:
        expect_close(
            result.lse,
            expected.lse,
            because=f"the log-sum-exp of the scores, to base {declared.base}",
        )
    except Violation as violation:
        if reading := _reading_of(result.lse, expected.lse, declared):
            violation.message += f"; it is {reading}"
        raise
    expect_close(
        result.output, expected.output, because="the oracle's value, with a log-sum-exp beside it"
    )


def _reading_of(lse: RecordedTensor, expected: Ball, declared: Lse) -> str:
    """Return what a wrong log-sum-exp is instead, if all its finite numbers are near to that; else
    "".
    """
    natural = expected.mid * declared.log_base
    actual, own = (
        lse.tensor.detach().double(),
        ("that to base 2" if declared.base == "2" else "the natural one"),
    )
    for reading, of in READINGS.items():
        value = of(natural)
        known = value.isfinite()
        near = (actual - value).abs() <= NEAR * value.abs().clamp(min=NEAR)
        if reading != own and bool(known.any()) and bool(near[known].all()):
            return reading
    return ""


@property_of(
    "LSE-3",
    Domain(
        masks=COMMON,
        causal=BOTH,
        values=MODERATE,
        modes=WITH_GRADIENT,
        dtypes=BOUNDED,
        need_weights=(False,),
        lse=(True,),
    ),
    needs=("lse.gradient", "gradients"),
    requires="LSE-1",
    must_reject=("lopsided", "lse_detached"),
    max_cases=40,
)
def the_log_sum_exp_has_its_gradient(session: Session, case: Case) -> None:
    """The gradients of a loss of output and log-sum-exp are within the bound of the oracle's."""
    problem = case.problem()
    assume(not has_empty_row(session, problem), "a row is empty, whose log-sum-exp is infinite")
    upstream = session.upstream(problem)
    drawn = torch.randint(-2, 3, problem.shape[:3], generator=case.generator)
    upstream_lse = drawn.to(problem.query.device, torch.float64)
    leaves = problem.map_inputs(leaf_of)
    result = session.forward_all(leaves)
    assert result.lse is not None
    with guarded("backward() of output and log-sum-exp"):
        of_lse = upstream_lse.to(result.lse.tensor.dtype)
        differentiate(result.output.tensor, upstream, others=[(result.lse.tensor, of_lse)])
    expected = session.expected_gradients(problem, upstream, upstream_lse)
    for name, gradient in input_gradients(session, leaves).items():
        expect_close(
            gradient, expected[name], because="the gradient of a loss of output and log-sum-exp"
        )
