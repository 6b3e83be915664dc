"""CMP-4: under autocast."""

from __future__ import annotations

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, DENSE, MODERATE, Domain
from mha.conformance.cases.layouts import leaf_of
from mha.conformance.cases.masks import EMPTY
from mha.conformance.cases.modes import MODES
from mha.conformance.harness.assertions import assume
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.shared import expect_finite, expect_result, refuses
from mha.spec import Problem, oracle

LOW = torch.bfloat16
UNDER_AUTOCAST = Domain(
    masks=("none", "padding", "queries", "bias", "empty_item"),
    causal=BOTH,
    values=MODERATE,
    layouts=DENSE,
    modes=("eval",),
    max_length=17,
    dtypes=("float32",),
)
WRONGS = ("zeros", "mean", "noise")


@property_of(
    "CMP-4", UNDER_AUTOCAST, needs="composes=autocast", requires="HED-1", must_reject=WRONGS, min_rejection_rate=0.3
)
def autocast_is_within_the_low_precision_bound(session: Session, case: Case) -> None:
    problem = case.problem()
    assume(not refuses(session, problem), "a row is empty, and the declared policy is 'error'")
    answer = oracle(problem, session.claims, autocast=LOW)
    asked = case.need_weights and case.mask not in EMPTY  # that an empty row changes with them is for MSK-8
    seen = session(problem, mode="autocast", need_weights=asked, dtypes=(LOW, problem.query.dtype))
    expect_result(seen, answer, "the oracle's value, with each product in bfloat16")
    if session.claims.gradients and not bool(answer.empty.any()):
        _expect_a_backward_pass(session, problem)


def _expect_a_backward_pass(session: Session, problem: Problem) -> None:
    """What a call under autocast gave can be differentiated, and every gradient is finite."""
    leaves, built = problem.map_inputs(leaf_of), session.built(problem)
    called, session.scripted = built.attention, False
    with guarded("backward() of a call under autocast"):
        with MODES["autocast"].enter(session.case.device):
            output = called(leaves.query, leaves.key, leaves.value, mask=leaves.mask, is_causal=leaves.is_causal).output
        output.float().sum().backward()
    seen = [session.unscripted(x.grad, f"{name}.grad") for name, x in leaves.distinct().items() if x.grad is not None]
    seen += session.weight_gradients(built, problem.weights).values() if session.claims.weight_gradients else ()
    for each in seen:
        expect_finite(each, "after a call under autocast")
