"""Masks: the canonical form, the conventions of implementations, and the causal mask."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mha.spec.claims import Alignment
from mha.spec.dtypes import computable

MaskConvention = Literal["keep", "drop", "additive"]


def to_convention(mask: Tensor, convention: MaskConvention, dtype: torch.dtype) -> Tensor:
    """Translate a canonical mask into an implementation's convention.

    mask: boolean, True = may attend; any other dtype is returned as it is, for the implementation to take or refuse.
    convention: "keep" (True = may attend), "drop" (True = may not) or "additive" (0 or -infinity, in `dtype`).
    """
    if mask.dtype != torch.bool or convention == "keep":
        return mask
    if convention == "drop":
        return ~mask
    return computable(torch.zeros_like(mask, dtype=dtype)).masked_fill(~mask, float("-inf")).to(dtype)


def causal_mask(queries: int, keys: int, alignment: Alignment, device: torch.device | str = "cpu") -> Tensor:
    """Return the boolean (L, S) mask under which query i may attend to key j.

    "top_left": j <= i, as `torch.nn.functional.scaled_dot_product_attention` has it.
    "bottom_right": j <= i + S - L, so that the last query sees every key, as decoding with a cache wants it.
    """
    offset = keys - queries if alignment == "bottom_right" else 0
    rows = torch.arange(queries, device=device).unsqueeze(1)
    return torch.arange(keys, device=device) <= rows + offset


def join_causal(mask: Tensor | None, causal: Tensor) -> Tensor:
    """Return the one mask that is both: their logical AND, or -infinity where a floating-point mask meets the causal.

    mask: canonical, or None. causal: boolean (L, S), as from `causal_mask`. Clause CAU-4.
    """
    if mask is None:
        return causal
    return mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, float("-inf"))
