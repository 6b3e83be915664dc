"""Backward passes, and the gradients of the output that they start from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.memory_layouts import lay_out
from mha.conformance.harness.errors import Discard
from mha.conformance.harness.plain import viewed
from mha.spec import Claims, Problem
from mha.spec.dtypes import computable

# How the gradient of an output may lie in memory.
UPSTREAM_LAYOUTS = ("contiguous", "transposed", "column_major", "sliced")


def upstream_of(case: Case, claims: Claims, problem: Problem, rows: Tensor | None) -> Tensor:
    """Return a gradient of the output (B, L, D): small integers, in one of several layouts.

    Where `rows` are all, it is sometimes a one that is expanded, as in the backward pass of
    `output.sum()`.

    rows: boolean (B, L), outside of which the gradient is 0. By default these are the rows with a
        key in every head, or all if the policy for the others is "zeros".

    Raises Discard where a row is NaN by policy.
    """
    if rows is None and claims.empty_row != "zeros":
        rows = problem.allowed(claims.alignment).any(-1).all(1)
        if claims.empty_row == "nan" and not bool(rows.all()):
            raise Discard(
                "a row is NaN by policy, and what that does to gradients is a matter of MSK-9"
            )
    batch, _, queries, _ = problem.shape
    shape = (batch, queries, problem.config.output_width)
    which = case.seed % 4
    if rows is None and which == 3:
        return problem.query.new_ones(()).expand(shape)
    drawn = torch.randint(-2, 3, shape, generator=case.generator).to(problem.query)
    if rows is not None:
        drawn = (computable(drawn) * rows.unsqueeze(-1).to(drawn.device)).to(drawn)
    return lay_out(UPSTREAM_LAYOUTS[which], drawn)


def differentiate(
    output: Tensor,
    upstream: Tensor,
    *,
    create_graph: bool = False,
    others: Sequence[tuple[Tensor, Tensor]] = (),
) -> None:
    """Do as `output.backward(upstream, create_graph=create_graph)`, without importing SymPy.

    Judged code gets another object than `upstream`.

    others: further results of the call, each with its gradient.

    A gradient that is passed to `backward` makes torch import that to compare shapes, which takes
    longer than most clauses. A loss without one does not.
    """
    loss = _Loss.apply(output, viewed(upstream))  # type: ignore[no-untyped-call]  # of torch
    for result, gradient in others:
        loss = loss + _Loss.apply(result, viewed(gradient))  # type: ignore[no-untyped-call]  # of torch
    loss.backward(create_graph=create_graph)


def gradients_of(
    output: Tensor, upstream: Tensor, inputs: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return what `torch.autograd.grad` does, and keep the graph, without importing SymPy."""
    loss = _Loss.apply(output, viewed(upstream))  # type: ignore[no-untyped-call]  # of torch
    return torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)


class _Loss(torch.autograd.Function):
    """A number whose gradient is the upstream one of the output, as it lies in memory."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, upstream: Tensor) -> Tensor:
        ctx.upstream = upstream
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *of_the_number: Tensor) -> tuple[Tensor, None]:
        return ctx.upstream, None
