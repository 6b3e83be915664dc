"""Backward passes with a given gradient of the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mha.conformance.harness.plain import viewed


def differentiate(
    output: Tensor,
    upstream: Tensor,
    *,
    create_graph: bool = False,
    others: Sequence[tuple[Tensor, Tensor]] = (),
) -> None:
    """Do as `output.backward(upstream, create_graph=create_graph)`, without importing SymPy.

    Judged code gets another object than `upstream`. others: further results of the call, each with
    its gradient.

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
