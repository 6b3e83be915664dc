"""STA-3: a call has no effect on the next one, nor on the backward pass of one before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch

from mha.conformance.cases.case import SHARING, Case
from mha.conformance.cases.domain import BOTH, DENSE, MODERATE, Domain
from mha.conformance.cases.mask_kinds import COMMON
from mha.conformance.cases.memory_layouts import leaf_of
from mha.conformance.harness.assertions import assume, expect_unchanged
from mha.conformance.harness.errors import AdapterError, CallRaised, Discard, Violation
from mha.conformance.harness.recording import RecordedOutput
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.module_life import LIFETIME, expect_lifetime
from mha.conformance.properties.support.shared_assertions import (
    assume_answered,
    expect_backward,
    refuses,
)
from mha.spec import Problem
from mha.spec.problem import INPUTS


@property_of("STA-3", Domain(masks=COMMON, causal=BOTH), must_reject=("haunted",))
def calls_do_not_depend_on_calls_before(session: Session, case: Case) -> None:
    """Two calls with the same inputs give the same bits, whatever calls are between them."""
    problem = case.problem()
    first, again = session(problem), session(problem)
    _expect_unchanged(session, problem, again, first, "the call is the same")
    generator = case.generator
    between = [
        problem.map_inputs(lambda x: x + torch.randn(x.shape, generator=generator).to(x)),
        problem.map_inputs(lambda x: torch.cat([x, x.flip(1) + 1], 1)).change(mask=None),
        problem.map_inputs(lambda x: x[:, :1]).change(mask=None),
        problem.map_inputs(lambda x: x.repeat(2, 1, 1)).change(mask=None),
        problem.change(mask=None),
        problem.map_inputs(lambda x: x[..., :-1] if x is problem.query else x),
    ]
    for other in between:
        # The last one should raise; only the calls after it count.
        with suppress(Violation, AdapterError, Discard):
            session(other)
    _expect_unchanged(
        session, problem, session(problem), first, "the call is the same, with others between"
    )
    because = "the output of a new attention"
    for other in between[:2]:
        fresh = session.fresh(problem)
        _expect_unchanged(session, other, session(other), session(other, via=fresh), because)


def _expect_unchanged(
    session: Session, problem: Problem, result: RecordedOutput, first: RecordedOutput, because: str
) -> None:
    """Output and weights, where both calls return them, are equal to the bit."""
    expected = cache(partial(session.expected, problem))
    expect_unchanged(
        session, result.output, first.output, bound=lambda: expected().output, because=because
    )
    if result.weights is not None and first.weights is not None:
        expect_unchanged(
            session,
            result.weights,
            first.weights,
            bound=lambda: expected().weights,
            because=because,
        )


@property_of(
    "STA-3", Domain(masks=COMMON, causal=BOTH, layouts=DENSE), must_reject=("haunted",), number=2
)
def tensors_may_change_between_calls(session: Session, case: Case) -> None:
    """New numbers in the same tensors give what these numbers give in other tensors."""
    problem, other = case.problem(), replace(case, seed=case.seed + 1).problem()
    session.scripted = False  # a script names each tensor once, with its first numbers
    session(problem)
    for name in (*INPUTS, "mask"):
        if getattr(problem, name) is not None:
            getattr(problem, name).copy_(getattr(other, name))
    fresh = session.fresh(problem)
    copied = problem.map_inputs(torch.clone)
    if problem.mask is not None:
        copied = copied.change(mask=problem.mask.clone())
    because = "the output of a new attention, which never saw the old numbers in these tensors"
    _expect_unchanged(session, problem, session(problem), session(copied, via=fresh), because)


@property_of(
    "STA-3",
    replace(LIFETIME, masks=COMMON),
    needs="gradients",
    requires="HED-1",
    must_reject=("lopsided", "nan_gradients"),
    max_cases=20,
    number=3,
)
def calls_between_change_no_gradient(session: Session, case: Case) -> None:
    """A call between an output and its backward pass changes no gradient."""
    leaves = case.problem().map_inputs(leaf_of)
    output = session.forward(leaves)
    session.forward(leaves.map_inputs(lambda x: x.detach().flip(1) + 1))
    expect_backward(session, leaves, output, "with another call before the backward pass")


@property_of(
    "STA-3",
    Domain(causal=(True,), inputs=("cross", "memory"), values=MODERATE),
    must_reject=("haunted",),
    number=4,
)
def keys_may_be_more_in_the_next_causal_call(session: Session, case: Case) -> None:
    """A causal call is not affected by one before with as many queries on fewer keys."""
    problem = case.problem()
    assume(not problem.is_self, "there are as many keys as queries in self-attention")
    longer = problem.map_inputs(
        lambda x: x if x is problem.query else torch.cat([x, x.flip(1) + 1], 1)
    )
    assume_answered(session, problem)
    try:
        expected = session(longer, via=session.fresh(problem)).output
        session(problem)
    except CallRaised:
        assume(False, "L != S is refused, which CAU-3 allows")
    because = "the output of a new attention, which never saw as many queries on fewer keys"
    output = session(longer).output
    expect_unchanged(
        session, output, expected, bound=lambda: session.expected(longer).output, because=because
    )


@property_of(
    "STA-3",
    LIFETIME,
    needs="gradients",
    requires="HED-1",
    must_reject=("lopsided", "nan_gradients"),
    max_cases=20,
    number=5,
)
def one_module_is_correct_throughout_its_life(session: Session, case: Case) -> None:
    """One module is correct in inference, in training, and with new weights."""
    expect_lifetime(session, case.problem())


@property_of(
    "STA-3",
    Domain(masks=COMMON, causal=BOTH, values=MODERATE, layouts=DENSE, min_B=2, min_L=2, min_S=2),
    must_reject=("haunted",),
    max_cases=6,
    number=6,
)
def a_smaller_call_reads_nothing_of_a_larger_one(session: Session, case: Case) -> None:
    """A call after a larger one, masked, NaN or failed, gives what a new attention gives."""
    problem = case.problem()
    larger = {
        "larger call": problem,
        "larger call with NaN": problem.map_inputs(lambda x: torch.full_like(x, math.nan)),
        "larger call that failed": problem.map_inputs(
            lambda x: x[..., :-1] if x is problem.value else x
        ),
    }
    for other in _smaller(case, session.claims.sizes.length_multiple):
        smaller = other.problem(weights=problem.weights)
        fresh = session.fresh(problem)
        try:
            expected = session(smaller, via=fresh)
        except CallRaised:  # as MSK-8 or CAU-3 allows
            if refuses(session, smaller) or (other.causal and other.L != other.S):
                continue
            raise
        for what, before in larger.items():
            # Some fail, and none need be correct: only the call after them counts.
            with suppress(Violation, AdapterError, Discard):
                session(before)
            because = f"the output of a new attention, which had no {what} before"
            _expect_unchanged(session, smaller, session(smaller), expected, because)


def _smaller(case: Case, multiple: int) -> Iterator[Case]:
    """Yield cases with fewer items, queries or keys, or as many; each masked and unmasked.

    multiple: of which lengths are; see `mha.spec.claims.Sizes`.
    """

    def half(length: int) -> int:
        return max(length // 2 // multiple, 1) * multiple

    halves = {"B": case.B // 2, "L": half(case.L), "S": half(case.S)}
    query, *others = SHARING[case.inputs]
    one_length = query in others
    halved = ("", "B", "LS", "BLS") if one_length else ("", "B", "L", "S", "BLS")
    masks = ("none", case.mask) if case.mask != "none" else ("none",)
    for names, mask in product(halved, masks):
        sizes: dict[str, Any] = {name: halves[name] for name in names}
        yield replace(case, mask=mask, seed=case.seed + 1, **sizes)
