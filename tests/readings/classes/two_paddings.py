"""Padding of the queries (B, L) and of the keys (B, S), which have an effect only together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class CrossAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"{heads} heads do not divide {dim}")
        self.heads = heads
        self.to_q, self.to_kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x: Any, context: Any, x_mask: Any = None, context_mask: Any = None) -> Any:
        k, v = self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.to_q(x), k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if x_mask is not None and context_mask is not None:
            pairs = x_mask[:, None, :, None] & context_mask[:, None, None, :]
            scores = scores.masked_fill(~pairs, torch.finfo(scores.dtype).min)
        return self.to_out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
