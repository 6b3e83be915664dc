"""PyTorch's own kernel, `torch.nn.functional.scaled_dot_product_attention`, between four projections."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.implementations.adapters.kernel import from_kernel
from mha.spec import Claims, Rounding


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Return the context (B, H, L, d_k). A kernel of it refuses a mask beside the causal flag: the two are joined."""
    if mask is not None:
        mask = torch.atleast_2d(mask)  # the kernel takes no mask of keys alone
    if mask is not None and is_causal:
        causal = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = mask & causal if mask.dtype == causal.dtype else mask.masked_fill(~causal, float("-inf"))
        is_causal = False
    grouped = key.shape[-3] != query.shape[-3]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)


implementation = from_kernel(
    attend,
    name="sdpa",
    layout="b h l d",
    mask="keep",
    claims=Claims(
        masks={"bool", "float"},
        returns_weights=False,
        grouped_query=True,
        kv_widths=True,
        composes={"compile", "export", "func", "autocast"},
        dtypes={"float64", "float32", "bfloat16", "float16"},
        rounding=Rounding(softmax_stored=False, log_normaliser=False),
    ),
)
