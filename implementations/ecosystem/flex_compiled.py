"""`flex_attention`, compiled for the CPU: each kind of call takes a compiler ten seconds."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from mha.implementations import from_kernel
from mha.implementations.adapters.compiled import compiled_again
from mha.spec import Claims, Rounding

# Masks are not claimed: where the lengths are dynamic, the C++ of a function that reads one is
# invalid, as is that of one that reads a number; and otherwise, docs/pytorch.md.
compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True)


def not_later(b, h, i, j):
    return i >= j


def attend(query, key, value, is_causal=False):
    """Return the context (B, H, L, d_v). There is no log-sum-exp and no backward pass."""
    sizes = (*query.shape[:3], key.shape[2])
    if 0 in sizes:  # create_block_mask rejects them
        return query.new_zeros(*query.shape[:3], value.shape[3])
    blocks = create_block_mask(not_later, *sizes, device="cpu") if is_causal else None
    return compiled_again(lambda: compiled(query, key, value, None, blocks, enable_gqa=True))


implementation = from_kernel(
    attend,
    name="flex_attention-compiled",
    mask=None,
    claims=Claims(
        masks=(),
        returns_weights=False,
        gradients=False,
        grouped_query=True,
        dtypes={"float32", "bfloat16"},
        devices={"cpu"},
        rounding=Rounding(softmax_stored=False),
    ),
)
