"""`F.scaled_dot_product_attention` with one backend, MATH or FLASH_ATTENTION."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mha.implementations import from_kernel
from mha.spec import Claims, Lse, Rounding, Scores, Sizes, causal_mask, join_causal
from mha.spec.claims import COMPOSITIONS, COMPUTE_DTYPES


def joined(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor | None, bool]:
    """Return a mask and a flag that are not rejected together: the mask hides the future too."""
    if mask is None or not is_causal:
        return mask, is_causal
    causal = causal_mask(query.shape[2], key.shape[2], "top_left", query.device)
    return join_causal(mask, causal), False


def attend_math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    mask, is_causal = joined(query, key, mask, is_causal)
    if mask is not None:
        mask = torch.atleast_2d(mask)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=True
        )


def attend_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    mask, is_causal = joined(query, key, mask, is_causal)
    if mask is not None:  # masks with three axes are rejected
        mask = mask[(None,) * (4 - mask.ndim)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(
            query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=True
        )


CLAIMS = {
    "returns_weights": False,
    "grouped_query": True,
    "kv_widths": True,
    "composes": COMPOSITIONS,
    "dtypes": COMPUTE_DTYPES,
    "rounding": Rounding(softmax_stored=False, log_normaliser=False),
}
math = from_kernel(
    attend_math,
    name="sdpa_math",
    claims=Claims(masks={"bool", "float"}, value_width=True, scores=Scores(scale="any"), **CLAIMS),
)
# Float masks are not claimed: those that require a gradient are rejected. Nor are values of another
# width, which are rejected; so are heads whose numbers do not lie side by side, by the stride of
# their last axis, of one number too, which `contiguous` leaves as it is. Scales of 0 or less give
# NaN beside the causal flag (docs/pytorch.md).
flash = from_kernel(
    attend_flash,
    name="sdpa_flash",
    contiguous=True,
    claims=Claims(
        masks={"bool"},
        scores=Scores(scale="positive"),
        sizes=Sizes(head_dim_multiple=2),
        **CLAIMS,
    ),
)


def attend_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the context and the log-sum-exp of the operator behind `attend_flash`."""
    groups = query.shape[1] // key.shape[1]  # which it does not know
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    mask = None if mask is None else mask[(None,) * (4 - mask.ndim)]
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return operator(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)


operator = from_kernel(
    attend_operator,
    name="aten_flash_for_cpu",
    mask="additive",
    claims=Claims(masks={"bool"}, scores=Scores(scale="positive"), lse=Lse(), **CLAIMS),
)
