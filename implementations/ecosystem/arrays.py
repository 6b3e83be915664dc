"""Tensors of torch as arrays of other packages, bfloat16 included, and gradients through these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor


def numpy_of(tensor: Tensor | None) -> Any:
    """Return a tensor as an array of NumPy, which shares no memory with it; None for none."""
    if tensor is None:
        return None
    copied = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    if copied.dtype == torch.bfloat16:  # which NumPy has not
        return copied.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return copied.numpy()


def tensor_of(array: Any) -> Tensor:
    """Return an array, of NumPy or one that NumPy reads, as a tensor of its own memory."""
    array = np.array(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


# Returns the results of a function as tensors, and what makes gradients of its inputs of theirs.
Pullback = Callable[..., tuple[Tensor, ...]]
WithPullback = Callable[..., tuple[tuple[Tensor, ...], Pullback]]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: WithPullback, *inputs: Tensor) -> tuple[Tensor, ...]:
        results, ctx.pullback = function(*inputs)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, *ctx.pullback(*gradients)


def differentiable(function: WithPullback, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the results of a function of another framework, which torch can differentiate.

    function: called with the inputs; returns its results, and its pullback.
    """
    results: tuple[Tensor, ...] = _Differentiable.apply(function, *inputs)
    return results
