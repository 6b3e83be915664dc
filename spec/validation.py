"""Validation of the arguments of a call, for implementations to share (SHP-6 and MSK-12)."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from mha.spec.config import Config
from mha.spec.masks import form_of


def validate_call(
    config: Config,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    masks: Collection[str] = ("bool", "float"),
) -> None:
    """Raise ValueError for shapes that do not match, and TypeError for a mask of another dtype.

    query: (B, L, D).
    key: (B, S, kdim).
    value: (B, S, vdim).
    mask: broadcastable to (B, H, L, S), or None.
    masks: the accepted forms of mask: "bool", "float" for the dtype of the query, and "int" for any
        dtype of integers.

    >>> config, x = Config(d_model=6, n_heads=2), torch.ones(1, 5, 6)
    >>> validate_call(config, x, x, x, mask=torch.ones(5, 4, dtype=torch.bool))
    Traceback (most recent call last):
    ValueError: mask must be broadcastable to (B, H, L, S) = (1, 2, 5, 5), but has shape (5, 4)
    """
    inputs = {
        "query": (query, config.d_model),
        "key": (key, config.key_width),
        "value": (value, config.value_width),
    }
    for name, (tensor, width) in inputs.items():
        if tensor.ndim != 3 or tensor.shape[-1] != width:
            raise ValueError(
                f"{name} must have shape (batch, length, {width}), but has shape"
                f" {tuple(tensor.shape)}"
            )
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, (tensor, _) in inputs.items())
        raise ValueError(
            "batch sizes, and the lengths of key and value, must be equal, but the shapes are"
            f" {shapes}"
        )
    if mask is not None:
        scores = query.shape[0], config.n_heads, query.shape[1], key.shape[1]
        _validate_mask(mask, scores, query.dtype, masks)


def _validate_mask(
    mask: Tensor, scores: tuple[int, int, int, int], dtype: torch.dtype, masks: Collection[str]
) -> None:
    """Raise TypeError unless the mask has an accepted dtype, and ValueError unless it broadcasts.

    scores: (B, H, L, S).
    """
    form = form_of(mask)
    if form not in masks or (form == "float" and mask.dtype != dtype):
        dtypes = {"bool": "torch.bool", "float": str(dtype), "int": "an integer dtype"}
        accepted = " or ".join(dtypes[form] for form in masks)
        raise TypeError(f"mask must have dtype {accepted}, but has {mask.dtype}")
    aligned = zip(reversed(mask.shape), reversed(scores), strict=False)
    if mask.ndim > 4 or any(size not in (1, full) for size, full in aligned):
        raise ValueError(
            f"mask must be broadcastable to (B, H, L, S) = {scores}, but has shape"
            f" {tuple(mask.shape)}"
        )
