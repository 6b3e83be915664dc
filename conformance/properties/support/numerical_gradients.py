"""Gradients beside differences of outputs (GRD-2), and those of the plain formula (GRD-1)."""

from __future__ import annotations

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.memory_layouts import leaf_of
from mha.conformance.cases.reference import plain_formula
from mha.conformance.cases.transforms import with_dropout
from mha.conformance.harness.assertions import assume, expect, expect_no_worse
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.session import Session
from mha.conformance.properties.support.shared_assertions import (
    assume_as_accurate_as_plain,
    assume_finite,
    has_empty_row,
)
from mha.spec import Problem
from mha.spec.problem import INPUTS


def expect_gradcheck(session: Session, case: Case) -> None:
    """torch.autograd.gradcheck passes for the inputs of a case, with dropout where claimed."""
    assume(not session.claims.narrows, "a step is declared to be in a narrower dtype")
    problem = case.problem()
    if session.claims.dropout and case.mode == "train":
        problem = with_dropout(problem, 0.5)
    drops = problem.config.drops
    assume_finite(session, problem)
    session.built(problem)  # now, since a construction may draw random numbers
    inputs = [leaf_of(x) for x in (problem.query, problem.key, problem.value)]
    if case.inputs == "self":
        inputs = inputs[:1]

    def output(*leaves: Tensor) -> Tensor:
        parts = leaves * 3 if len(leaves) == 1 else leaves
        with torch.random.fork_rng(enabled=drops):
            if drops:  # the same in each call
                torch.manual_seed(case.seed)
            return session.forward(problem.change(**dict(zip(INPUTS, parts, strict=True))))

    with guarded("torch.autograd.gradcheck"):
        passes = torch.autograd.gradcheck(output, inputs, fast_mode=False, raise_exception=False)
    expect(passes, "torch.autograd.gradcheck fails: numerical and analytical Jacobians differ")


def expect_gradients_no_worse_than_plain(session: Session, problem: Problem) -> None:
    """Root mean square errors of gradients are at most twice those of the plain formula."""
    assume_as_accurate_as_plain(session)
    assume(not has_empty_row(session, problem), "a row is empty")
    upstream = session.upstream(problem)
    reported = session.gradients(problem, upstream)
    expected = session.expected_gradients(problem, upstream)
    for name, plain in _gradients_of_plain_formula(session, problem, upstream).items():
        # A bias has so few elements that their root mean square is a matter of luck.
        if name in reported and plain.ndim > 1:
            actual = reported[name]
            expect_no_worse(actual.code, actual.tensor, plain, expected[name].mid)


def _gradients_of_plain_formula(
    session: Session, problem: Problem, upstream: Tensor
) -> dict[str, Tensor]:
    """Return the gradients of the plain formula by name, of inputs and weights, in their dtype."""
    leaves = problem.map_inputs(leaf_of)
    named = {name: getattr(leaves, name) for name in INPUTS}
    if problem.config.projected:
        weights = {name: leaf_of(x) for name, x in problem.weights.named()}
        leaves = leaves.change(**weights)
        named |= dict(leaves.weights.named())
    output = plain_formula(
        leaves, problem.allowed(session.claims.alignment), session.claims.scale, session.claims
    )
    output.backward(upstream)
    return {name: leaf.grad for name, leaf in named.items() if leaf.grad is not None}
