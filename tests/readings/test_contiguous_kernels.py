"""Kernels that refuse, or misread, heads that are not contiguous."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mha.implementations import ImplementationError
from mha.implementations.inference.kernels import infer_kernel
from support.judging import expect_pass


def of_contiguous_heads(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """As kernels do that compute their strides, (B, H, L, d_k)."""
    if not all(x.is_contiguous() for x in (q, k, v)):
        raise ValueError("heads must be contiguous")
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def of_contiguous_lengths(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """The same of (B, L, H, d_k), which a projection gives it as it is."""
    if not all(x.is_contiguous() for x in (q, k, v)):
        raise ValueError("heads must be contiguous")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


class OfContiguousGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]  # of one argument
        assert gradient.is_contiguous()
        q, k, v, weights = ctx.saved_tensors
        of_weights = gradient @ v.mT
        of_scores = (
            weights
            * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
            / q.shape[-1] ** 0.5
        )
        return of_scores @ k, of_scores.mT @ q, weights.mT @ gradient


def with_contiguous_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As in the tutorial of Triton: the gradient must be contiguous too."""
    if not all(x.is_contiguous() for x in (q, k, v)):
        raise ValueError("heads must be contiguous")
    return OfContiguousGradients.apply(q, k, v)  # type: ignore[no-untyped-call,no-any-return]  # torch's own


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        (of_contiguous_heads, "(b, h, l, d)"),
        (with_contiguous_gradients, "(b, h, l, d)"),
        (of_contiguous_lengths, "(b, l, h, d)"),
    ],
)
def test_kernel_that_refuses_other_heads_is_given_contiguous_ones(kernel: Any, shape: str) -> None:
    result = infer_kernel(kernel)
    assert f"inputs   q, k, v, of shape {shape}, contiguous ones alone  [tested]" in result.report()
    assert "contiguous=True" in result.declaration
    clauses = ["SHP-1", "SHP-7", "HED-1", "EQV-8", "GRD-1"]
    expect_pass(result, *clauses)


def of_dense_memory(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Reads (B, H, L, d_k) as if it were contiguous, and does not raise if it is not."""
    assert q.ndim == 4
    dense = [x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*dense)


def test_kernel_that_is_wrong_for_other_heads_is_not_given_contiguous_ones() -> None:
    with pytest.raises(ImplementationError, match="its output matches no formula of attention"):
        infer_kernel(of_dense_memory)
