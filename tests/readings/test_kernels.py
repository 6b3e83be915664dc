"""Kernels that are wrong for a caller's tensors, which the tensors of projections show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mha.implementations import from_kernel
from mha.spec import Claims
from support.judging import judged

# To look for causes and simpler cases takes longer than to judge; tests/diagnosis does the first.
pytestmark = pytest.mark.usefixtures("undiagnosed", "unshrunk")

SELF_ATTENTION = Claims(cross_attention=False, masks=(), causal=None, returns_weights=False)


def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def scales_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q *= q.shape[-1] ** -0.5
    return (q @ k.mT).softmax(-1) @ v


def reads_all_as_the_query_lies(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.as_strided(q.shape, q.stride(), x.storage_offset()) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def reads_items_one_after_another(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As if nothing lay between the items of key and value, as in a cache with room for more."""
    strides = (k[0].numel(), *k.stride()[1:])
    k, v = (
        x.as_strided(x.shape, strides, x.storage_offset()) if x.stride(0) > strides[0] else x
        for x in (k, v)
    )
    return F.scaled_dot_product_attention(q, k, v)


class _ReadsGradientAsHeadsLie(torch.autograd.Function):
    """The backward pass reads its gradient as if length came before heads in memory."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q, k, v)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (batch, heads, length, width) = gradients, gradients[0].shape
        strides = (length * heads * width, width, heads * width, 1)
        gradient = gradient.as_strided(
            (batch, heads, length, width), strides, gradient.storage_offset()
        )
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return torch.autograd.grad(F.scaled_dot_product_attention(*inputs), inputs, gradient)


def reads_gradient_as_heads_lie(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    result: Tensor = _ReadsGradientAsHeadsLie.apply(q, k, v)
    return result


@pytest.mark.parametrize(
    ("kernel", "clauses", "failing"),
    [
        (right, "STA-1,STA-2,SHP-7,GRD-1", ""),
        (scales_in_place, "STA-1,STA-2", "STA-1, STA-2"),
        (reads_all_as_the_query_lies, "SHP-7", "SHP-7"),
        (reads_items_one_after_another, "SHP-7", "SHP-7"),
        (reads_gradient_as_heads_lie, "GRD-1", "GRD-1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_kernel_is_given_what_a_model_gives_it(kernel: Any, clauses: str, failing: str) -> None:
    report = judged(from_kernel(kernel, mask=None, claims=SELF_ATTENTION), clauses)
    assert report.failing == failing
