"""Attention among adjacent nodes of a graph: each call gives an adjacency (B, N, N) of numbers."""

from __future__ import annotations

from typing import Any

from torch import nn


class GraphAttention(nn.Module):
    def __init__(self, in_dim: int, num_heads: int) -> None:
        super().__init__()
        if in_dim % num_heads:
            raise ValueError(f"{num_heads} heads do not divide {in_dim}")
        self.num_heads = num_heads
        self.Q, self.K, self.V, self.O = (nn.Linear(in_dim, in_dim) for _ in range(4))

    def forward(self, h: Any, adj: Any) -> Any:
        q, k, v = (
            layer(h).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.Q, self.K, self.V)
        )
        scores = q @ k.mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(adj.unsqueeze(1) == 0, -9e15)
        return self.O((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
