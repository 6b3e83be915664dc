"""The parts of a textbook: a scaled dot product with dropout, and the heads around it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mha.implementations.adapters.module import from_module
from mha.spec import Claims, Config, Output, Rounding, validate_call
from mha.spec.claims import COMPOSITIONS, COMPUTE_DTYPES


class ScaledDotProduct(nn.Module):
    """Equation 1 of Vaswani et al. 2017, with dropout on the weights."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the context (B, H, L, d_k), and the weights (B, H, L, S) before dropout.

        q: (B, H, L, d_k); k, v: (B, H, S, d_k); allowed: boolean, broadcastable to (B, H, L, S).
        """
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        # A row without an allowed key keeps its scores in the softmax, which would be NaN if all
        # were -infinity.
        empty = ~allowed.any(-1, keepdim=True)
        scores = scores.masked_fill(~(allowed | empty), -math.inf)
        weights = scores.softmax(-1).masked_fill(~allowed, 0.0)
        return self.dropout(weights) @ v, weights


class ModularAttention(nn.Module):
    """Section 3.2.2 of Vaswani et al. 2017: over one sequence, or from a decoder to an encoder."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = Config(d_model, n_heads, bias=bias, dropout=dropout)
        self.config.validate()
        self.query_projection = nn.Linear(d_model, d_model, bias=bias)
        self.key_projection = nn.Linear(d_model, d_model, bias=bias)
        self.value_projection = nn.Linear(d_model, d_model, bias=bias)
        self.output_projection = nn.Linear(d_model, d_model, bias=bias)
        self.attention = ScaledDotProduct(dropout)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Output:
        """Return the output (B, L, D) and the weights (B, H, L, S).

        query: (B, L, D); key, value: (B, S, D); mask: boolean, broadcastable to (B, H, L, S), True
        = may attend.
        """
        validate_call(self.config, query, key, value, mask, masks=("bool",))
        allowed = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device)
        if is_causal:
            allowed = allowed.tril()
        if mask is not None:
            allowed = allowed & mask
        q = self.split(self.query_projection(query))
        k = self.split(self.key_projection(key))
        v = self.split(self.value_projection(value))
        context, weights = self.attention(q, k, v, allowed)
        return Output(self.output_projection(self.combine(context)), weights)

    def split(self, x: Tensor) -> Tensor:
        """Return (B, L, D) as (B, H, L, d_k)."""
        heads: Tensor = x.unflatten(-1, (self.config.n_heads, self.config.head_dim))
        return heads.transpose(1, 2)

    def combine(self, x: Tensor) -> Tensor:
        """Return (B, H, L, d_k) as (B, L, D)."""
        return x.transpose(1, 2).flatten(2)


implementation = from_module(
    ModularAttention,
    name="modular",
    parameters={
        "w_q": "query_projection",
        "w_k": "key_projection",
        "w_v": "value_projection",
        "w_o": "output_projection",
    },
    mask="keep",
    claims=Claims(
        dropout=True,
        second_gradients=True,
        composes=COMPOSITIONS,
        dtypes=COMPUTE_DTYPES,
        rounding=Rounding(softmax_stored=False, log_normaliser=False, rescales=0),
    ),
)
