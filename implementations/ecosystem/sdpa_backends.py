"""`F.scaled_dot_product_attention` with one backend, MATH or FLASH_ATTENTION."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mha.implementations import from_kernel
from mha.spec import Claims, Rounding, causal_mask, join_causal
from mha.spec.claims import COMPOSITIONS, COMPUTE_DTYPES


def attend_math(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    if mask is not None and is_causal:  # rejected together
        mask, is_causal = (
            join_causal(mask, causal_mask(query.shape[2], key.shape[2], "top_left", query.device)),
            False,
        )
    mask = None if mask is None else torch.atleast_2d(mask)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            query, key, value, mask, 0.0, is_causal, enable_gqa=True
        )


def attend_flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    if mask is not None and is_causal:  # rejected together
        mask, is_causal = (
            join_causal(mask, causal_mask(query.shape[2], key.shape[2], "top_left", query.device)),
            False,
        )
    mask = (
        None if mask is None else mask[(None,) * (4 - mask.ndim)]
    )  # masks with three axes are rejected
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(
            query, key, value, mask, 0.0, is_causal, enable_gqa=True
        )


CLAIMS = {
    "returns_weights": False,
    "grouped_query": True,
    "kv_widths": True,
    "composes": COMPOSITIONS,
    "dtypes": COMPUTE_DTYPES,
    "rounding": Rounding(softmax_stored=False, log_normaliser=False),
}
math = from_kernel(attend_math, name="sdpa_math", claims=Claims(masks={"bool", "float"}, **CLAIMS))
# Float masks are not claimed: those that require a gradient are rejected.
flash = from_kernel(attend_flash, name="sdpa_flash", claims=Claims(masks={"bool"}, **CLAIMS))
