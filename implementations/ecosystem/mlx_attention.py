"""`mlx.core.fast.scaled_dot_product_attention` on the CPU."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import torch
from torch import Tensor

from mha.implementations import from_kernel
from mha.implementations.ecosystem.arrays import differentiable, numpy_of, tensor_of
from mha.spec import Claims, Rounding, Scores, causal_mask, join_causal


def mlx_of(tensor: Tensor) -> mx.array:
    array = numpy_of(tensor)
    if tensor.dtype == torch.bfloat16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


def from_mlx(array: mx.array) -> Tensor:
    if array.dtype == mx.bfloat16:
        return tensor_of(array.view(mx.uint16)).view(torch.bfloat16)
    return tensor_of(array)


def by_mlx(function, *inputs: Tensor) -> Tensor:
    """Return the result of a function of MLX's arrays, with its gradients."""

    def with_pullback(*tensors: Tensor):
        arrays = [mlx_of(x) for x in tensors]

        def pull(gradient: Tensor):
            return tuple(map(from_mlx, mx.vjp(function, arrays, [mlx_of(gradient)])[1]))

        return (from_mlx(function(*arrays)),), pull

    return differentiable(with_pullback, *inputs)[0]


def attend(query, key, value, mask=None, is_causal=False, scale=None, sinks=None):
    """`mask` is an array or the word "causal": both together are an array."""
    if is_causal and mask is not None:
        causal = causal_mask(query.shape[2], key.shape[2], "bottom_right", query.device)
        mask, is_causal = join_causal(mask, causal), False
    options = {"scale": query.shape[-1] ** -0.5 if scale is None else scale}
    given = {"q": query, "k": key, "v": value, "sinks": sinks}
    if is_causal:
        options["mask"] = "causal"
    elif mask is not None and mask.dtype == torch.bool:
        options["mask"] = mlx_of(mask)
    elif mask is not None:  # -infinity would give NaN in an empty row
        given["mask"] = mask.clamp(min=torch.finfo(mask.dtype).min)
    names = [name for name, x in given.items() if x is not None]

    def function(*arrays: mx.array) -> mx.array:
        named = dict(zip(names, arrays, strict=True))
        return mx.fast.scaled_dot_product_attention(**named, **options)

    return by_mlx(function, *(given[name] for name in names))


implementation = from_kernel(
    attend,
    name="mlx",
    mask="keep",
    claims=Claims(
        masks={"bool", "float"},
        causal="bottom_right",
        empty_row="uniform",
        returns_weights=False,
        grouped_query=True,
        value_width=True,
        scores=Scores(scale="any", sinks="input"),  # sinks in float32 beside bfloat16 are refused
        dtypes={"float64", "float32", "bfloat16", "float16"},
        devices={"cpu"},
        rounding=Rounding(log_normaliser=False),
    ),
)
