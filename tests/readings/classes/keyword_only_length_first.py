"""Inputs by keyword, of shape (L, B, D), masks (L, S, B), and a bias of query and key only."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


class Project(nn.Module):
    """A projection, split into heads."""

    def __init__(self, d_model: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(d_model, d_model, bias=bias)
        self.heads = heads

    def forward(self, x: Any) -> Any:
        return self.linear(x).unflatten(-1, (self.heads, -1))


class MultiHeadAttention(nn.Module):
    """Its scores are of shape (L, S, B, H)."""

    def __init__(
        self, heads: int, d_model: int, dropout_prob: float = 0.1, bias: bool = True
    ) -> None:
        super().__init__()
        assert d_model % heads == 0
        self.query, self.key = Project(d_model, heads, bias), Project(d_model, heads, bias)
        self.value, self.output = Project(d_model, heads, bias=True), nn.Linear(d_model, d_model)
        self.softmax, self.dropout = nn.Softmax(dim=1), nn.Dropout(dropout_prob)

    def forward(self, *, query: Any, key: Any, value: Any, mask: Any = None) -> Any:
        q, k, v = self.query(query), self.key(key), self.value(value)
        scores = torch.einsum("ibhd,jbhd->ijbh", q, k) / math.sqrt(q.shape[-1])
        if mask is not None:
            assert mask.shape[1] == len(k)
            scores = scores.masked_fill(mask.unsqueeze(-1) == 0, float("-inf"))
        weights = self.dropout(self.softmax(scores))
        context = torch.einsum("ijbh,jbhd->ibhd", weights, v)
        return self.output(context.flatten(2))
