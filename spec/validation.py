"""The checks that every call must make, for implementations to share: clauses SHP-6 and MSK-12."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from mha.spec.config import Config


def validate_call(
    config: Config,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    masks: Collection[str] = ("bool", "float"),
) -> None:
    """Raise ValueError for shapes that do not fit together, TypeError for a mask of a dtype that is not taken.

    query: (B, L, D); key: (B, S, kdim); value: (B, S, vdim); mask: broadcastable to (B, H, L, S).
    masks: the forms of mask that are taken, "bool" and "float" (of the query's dtype).
    """
    inputs = {"query": (query, config.d_model), "key": (key, config.key_width), "value": (value, config.value_width)}
    for name, (tensor, width) in inputs.items():
        if tensor.ndim != 3 or tensor.shape[-1] != width:
            raise ValueError(f"{name} must have the shape (batch, length, {width}), but has {tuple(tensor.shape)}")
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, (tensor, _) in inputs.items())
        raise ValueError(f"batch sizes must agree, and the lengths of key and value, but the shapes are {shapes}")
    if mask is None:
        return
    form = "bool" if mask.dtype == torch.bool else "float" if mask.dtype == query.dtype else None
    if form not in masks:
        taken = {"bool": "torch.bool", "float": str(query.dtype)}
        raise TypeError(f"a mask must be of dtype {' or '.join(taken[m] for m in masks)}, but is {mask.dtype}")
    scores = (query.shape[0], config.n_heads, query.shape[1], key.shape[1])
    aligned = zip(reversed(mask.shape), reversed(scores), strict=False)
    if mask.ndim > 4 or any(size not in (1, full) for size, full in aligned):
        raise ValueError(f"mask must be broadcastable to (B, H, L, S) = {scores}, but has {tuple(mask.shape)}")
