"""PyTorch's `flex_attention` (Dong et al. 2024): the mask is a function of positions."""

from __future__ import annotations

import math
from threading import Lock

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from mha.implementations.adapters.kernel import from_kernel
from mha.spec import Claims, Rounding
from mha.spec.claims import COMPUTE_DTYPES

# Outside of torch.compile, flex_attention captures a graph for each new shape. The setting that
# prevents it is global, hence the lock.
ONE_AT_A_TIME = Lock()


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Return the context (B, H, L, d_v).

    q: (B, H, L, d_k).
    k: (B, H_kv, S, d_k).
    v: (B, H_kv, S, d_v).
    mask: broadcastable to (B, H, L, S); boolean, True = may attend, or added to the scores.
    """
    batch, heads, queries = q.shape[:3]
    keys = k.shape[2]
    if 0 in (batch, heads, queries, keys):
        return q.new_zeros(q.shape)  # create_block_mask rejects empty tensors
    adds = mask is not None and mask.is_floating_point()

    def may_attend(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        allowed = i >= j if is_causal else j >= 0
        if mask is None:
            return allowed
        entry = at(mask, b, h, i, j)
        return allowed & (entry > -math.inf if adds else entry)

    def add_mask(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score if mask is None or not adds else score + at(mask, b, h, i, j)

    blocks = create_block_mask(may_attend, batch, heads, queries, keys, device=str(q.device))
    grouped = q.shape[1] != k.shape[1]
    with ONE_AT_A_TIME, torch.compiler.set_stance("force_eager"):
        context: Tensor = flex_attention(q, k, v, add_mask, blocks, enable_gqa=grouped)
    return context


def at(mask: Tensor, *indices: Tensor) -> Tensor:
    """Return the entry at (b, h, i, j) of a mask, which is broadcastable to (B, H, L, S)."""
    own = indices[len(indices) - mask.ndim :]
    # Along an axis of size 1, the entry is at 0.
    return mask[tuple(index * (size > 1) for index, size in zip(own, mask.shape, strict=True))]


implementation = from_kernel(
    attend,
    name="flex",
    mask="keep",
    claims=Claims(
        masks={"bool", "float"},
        returns_weights=False,
        gradients=False,  # on the CPU it raises in the backward pass
        grouped_query=True,
        kv_widths=True,
        value_width=True,
        # Compiled for the CPU, it gives wrong numbers for some masks: docs/pytorch.md.
        composes={"autocast"},
        dtypes=COMPUTE_DTYPES,
        rounding=Rounding(softmax_stored=False, log_normaliser=False),
    ),
)
