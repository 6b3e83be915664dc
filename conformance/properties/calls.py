"""STA-3: a call has no effect on the next, nor on the backward pass of one before; with grouped heads (GQA-1)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

import torch
from torch import nn

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, DENSE, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.layouts import leaf_of
from mha.conformance.cases.masks import COMMON, FEW
from mha.conformance.harness.assertions import assume, expect_close, expect_unchanged
from mha.conformance.harness.errors import CallRaised, Violation
from mha.conformance.harness.recording import RecordedOutput
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.shared import expect_backward, refuses
from mha.conformance.properties.variants import grouped, rebuilt
from mha.spec import Problem
from mha.spec.problem import INPUTS

SERVED = Domain(masks=("none", *FEW), causal=BOTH, values=MODERATE, modes=WITH_GRADIENT, dtypes=BOUNDED)


@property_of("STA-3", Domain(masks=COMMON, causal=BOTH))
def calls_do_not_depend_on_calls_before(session: Session, case: Case) -> None:
    problem = case.problem()
    first, again = session(problem), session(problem)
    _expect_same(session, problem, again, first, "the call is the same")
    generator = case.generator
    between = [
        problem.map_inputs(lambda x: x + torch.randn(x.shape, generator=generator).to(x)),
        problem.map_inputs(lambda x: torch.cat([x, x.flip(1) + 1], 1)).change(mask=None),
        problem.map_inputs(lambda x: x[:, :1]).change(mask=None),
        problem.map_inputs(lambda x: x.repeat(2, 1, 1)).change(mask=None),
        problem.change(mask=None),
        problem.change(query=problem.query[..., :-1]),
    ]
    for other in between:
        with suppress(Violation):  # the last of them should raise; only what comes after counts
            session(other)
    _expect_same(session, problem, session(problem), first, "the call is the same, with others between")
    because = "what an attention gives that has not been called before"
    for other in between[:2]:
        fresh = session.build(problem.config, problem.weights)
        _expect_same(session, other, session(other), session(other, via=fresh), because)


def _expect_same(session: Session, problem: Problem, seen: RecordedOutput, first: RecordedOutput, because: str) -> None:
    answer = cache(partial(session.expected, problem))
    expect_unchanged(session, seen.output, first.output, bound=lambda: answer().output, because=because)
    if seen.weights is not None and first.weights is not None:
        expect_unchanged(session, seen.weights, first.weights, bound=lambda: answer().weights, because=because)


@property_of("STA-3", Domain(masks=COMMON, causal=BOTH, layouts=DENSE), number=2)
def tensors_may_change_between_calls(session: Session, case: Case) -> None:
    problem, other = case.problem(), replace(case, seed=case.seed + 1).problem()
    session.scripted = False  # which would name each tensor once
    session(problem)
    for name in (*INPUTS, "mask"):
        if getattr(problem, name) is not None:
            getattr(problem, name).copy_(getattr(other, name))
    fresh = session.build(problem.config, problem.weights)
    copied = problem.map_inputs(torch.clone).change(mask=None if problem.mask is None else problem.mask.clone())
    because = "what an attention gives that has not seen what was in these tensors before"
    _expect_same(session, problem, session(problem), session(copied, via=fresh), because)


@property_of(
    "STA-3",
    replace(SERVED, masks=COMMON),
    needs="gradients",
    requires="HED-1",
    must_reject=("noise", "nan_gradients"),
    max_cases=20,
    number=3,
)
def calls_between_change_no_gradient(session: Session, case: Case) -> None:
    leaves = case.problem().map_inputs(leaf_of)
    output = session.forward(leaves)
    session.forward(leaves.map_inputs(lambda x: x.detach().flip(1) + 1))
    expect_backward(session, leaves, output, "with another call before the backward pass")


@property_of("STA-3", Domain(causal=(True,), inputs=("cross", "memory"), values=MODERATE), number=4)
def keys_may_be_more_in_the_next_causal_call(session: Session, case: Case) -> None:
    problem = case.problem()
    longer = problem.map_inputs(lambda x: x if x is problem.query else torch.cat([x, x.flip(1) + 1], 1))
    assume(not refuses(session, problem), "a row is empty, and the declared policy is 'error'")
    try:
        expected = session(longer, via=session.build(problem.config, problem.weights)).output
        session(problem)
    except CallRaised:
        assume(False, "L != S is refused, which CAU-3 allows")
    because = "what an attention gives that has not seen as many queries on fewer keys"
    seen = session(longer).output
    expect_unchanged(session, seen, expected, bound=lambda: session.expected(longer).output, because=because)


@property_of(
    "STA-3", SERVED, needs="gradients", requires="HED-1", must_reject=("noise", "nan_gradients"), max_cases=20, number=5
)
def one_module_serves_all_its_life(session: Session, case: Case) -> None:
    _expect_served(session, case.problem())


@property_of(
    "GQA-1",
    replace(SERVED, min_heads=2),
    needs=("grouped_query", "gradients"),
    requires="HED-1",
    must_reject=("noise", "nan_gradients"),
    max_cases=6,
)
def one_module_with_grouped_heads_serves_all_its_life(session: Session, case: Case) -> None:
    _expect_served(session, rebuilt(case, grouped(case)))


def _expect_served(session: Session, problem: Problem) -> None:
    """Inference, two steps of training, other weights in the same parameters, and inference again."""
    built = session.built(problem)
    module = built.attention
    for mode in ("inference", "no_grad"):
        session(problem, mode=mode)
    whose = built if isinstance(module, nn.Module) else None  # only its gradients can be cleared
    for step in ("first", "second"):
        if isinstance(module, nn.Module):
            module.zero_grad()
        leaves = problem.map_inputs(leaf_of)
        expect_backward(session, leaves, session.forward(leaves), f"in the {step} step of one module", whose)
    assume(isinstance(module, nn.Module), "the attention is no torch.nn.Module")
    assert isinstance(module, nn.Module)
    halved = problem.change(**{name: tensor / 2 for name, tensor in problem.weights.named()})
    other = session.built(halved).attention
    assert isinstance(other, nn.Module)
    if session.claims.weight_gradients:
        with torch.no_grad():
            for parameter, new in zip(module.parameters(), other.parameters(), strict=True):
                parameter.copy_(new)
    else:  # the weights need not be parameters
        module.load_state_dict(other.state_dict(), strict=False)
    for mode in ("eval", "inference"):
        seen = session(problem, mode=mode, via=built).output
        expect_close(
            seen, session.expected(halved).output, because="the oracle's value for the weights as they are now"
        )
