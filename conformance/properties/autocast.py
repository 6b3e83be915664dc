"""CMP-4: under autocast."""

from __future__ import annotations

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, DENSE, MODERATE, Domain
from mha.conformance.cases.layouts import leaf_of
from mha.conformance.cases.masks import EMPTY
from mha.conformance.harness.assertions import need
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.recording import MODES
from mha.conformance.harness.session import Trial
from mha.conformance.properties.registry import checks
from mha.conformance.properties.shared import expect_answer, expect_finite, refuses
from mha.spec import Problem, oracle

LOW = torch.bfloat16
UNDER_AUTOCAST = Domain(
    masks=("none", "padding", "queries", "bias", "empty_item"),
    causal=BOTH,
    regimes=MODERATE,
    layouts=DENSE,
    paths=("eval",),
    max_length=17,
    dtypes=("float32",),
)
WRONGS = ("zeros", "mean", "noise")


@checks("CMP-4", UNDER_AUTOCAST, needs="composes:autocast", after="HED-1", rejects=WRONGS, floor=0.3)
def autocast_is_within_the_low_precision_bound(attention: Trial, case: Case) -> None:
    problem = case.problem()
    need(not refuses(attention, problem), "a row is empty, and the declared policy is 'error'")
    answer = oracle(problem, attention.claims, autocast=LOW)
    asked = case.need_weights and case.mask not in EMPTY  # that an empty row changes with them is for MSK-8
    seen = attention(problem, path="autocast", need_weights=asked, dtypes=(LOW, problem.query.dtype))
    expect_answer(seen, answer, "the oracle's value, with each product in bfloat16")
    if attention.claims.gradients and not bool(answer.empty.any()):
        _expect_a_backward_pass(attention, problem)


def _expect_a_backward_pass(attention: Trial, problem: Problem) -> None:
    """What a call under autocast gave can be differentiated, and every gradient is finite."""
    leaves, built = problem.map_inputs(leaf_of), attention.built(problem)
    called, attention.scripted = built.attention, False
    with guarded("backward() of a call under autocast"):
        with MODES["autocast"].enter(attention.case.device):
            output = called(leaves.query, leaves.key, leaves.value, mask=leaves.mask, is_causal=leaves.is_causal).output
        output.float().sum().backward()
    seen = [attention.aside(x.grad, f"{name}.grad") for name, x in leaves.distinct().items() if x.grad is not None]
    seen += attention.told(built, problem.weights).values() if attention.claims.weight_gradients else ()
    for each in seen:
        expect_finite(each, "after a call under autocast")
