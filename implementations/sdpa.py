"""PyTorch's own kernel, `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.implementations.adapters.kernel import from_kernel
from mha.spec import Claims, Rounding, Scores
from mha.spec.claims import COMPOSITIONS, COMPUTE_DTYPES


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return the context (B, H, L, d_v).

    query: (B, H, L, d_k).
    key: (B, H_kv, S, d_k).
    value: (B, H_kv, S, d_v).
    mask: broadcastable to (B, H, L, S); boolean, True = may attend, or added to the scores.
    scale: by default 1/sqrt(d_k).
    """
    if mask is not None:
        mask = torch.atleast_2d(mask)  # a mask (S,) is rejected
    if mask is not None and is_causal:  # some backends reject the two together
        lengths = query.shape[-2], key.shape[-2]
        causal = torch.ones(lengths, dtype=torch.bool, device=query.device).tril()
        if mask.dtype == torch.bool:
            mask = mask & causal
        else:
            mask = mask.masked_fill(~causal, float("-inf"))
        is_causal = False
    grouped = key.shape[-3] != query.shape[-3]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


implementation = from_kernel(
    attend,
    name="sdpa",
    layout="b h l d",
    mask="keep",
    claims=Claims(
        masks={"bool", "float"},
        returns_weights=False,
        scores=Scores(scale="positive"),  # with a mask, a scale of 0 gives NaN on the CPU
        grouped_query=True,
        kv_widths=True,
        value_width=True,
        composes=COMPOSITIONS,
        dtypes=COMPUTE_DTYPES,
        rounding=Rounding(softmax_stored=False, log_normaliser=False),
    ),
)
