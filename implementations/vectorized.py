"""The common way: query, key and value are split into heads by view and transpose."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mha.implementations.adapters.module import from_module
from mha.spec import Claims, Config, Output, Rounding, validate_call
from mha.spec.claims import COMPOSITIONS, COMPUTE_DTYPES


class VectorizedAttention(nn.Module):
    """Equation 1 of Vaswani et al. 2017 for all heads at once, as tensors (B, H, L, d_k)."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = Config(d_model, n_heads, bias=bias, dropout=dropout)
        self.config.validate()
        self.q_proj = nn.Linear(d_model, d_model, bias=bias)
        self.k_proj = nn.Linear(d_model, d_model, bias=bias)
        self.v_proj = nn.Linear(d_model, d_model, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Output:
        """Return the output (B, L, D) and the weights (B, H, L, S).

        query: (B, L, D); key, value: (B, S, D); mask: broadcastable to (B, H, L, S); boolean, True
        = may attend, or added to the scores.
        """
        validate_call(self.config, query, key, value, mask)
        q = self.split(self.q_proj(query))
        k = self.split(self.k_proj(key))
        v = self.split(self.v_proj(value))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.config.head_dim)
        blocked = torch.zeros((), dtype=torch.bool, device=query.device)
        if mask is not None and mask.dtype == torch.bool:
            blocked = ~mask
        elif mask is not None:
            blocked = mask == float("-inf")
            scores = scores + mask.masked_fill(blocked, 0.0)
        if is_causal:
            blocked = blocked | torch.ones_like(scores[0, 0], dtype=torch.bool).triu(diagonal=1)
        blocked = blocked.expand(scores.shape)
        # An empty row keeps its scores in the softmax, so that neither it nor its gradient is NaN.
        empty = blocked.all(-1, keepdim=True)
        scores = scores.masked_fill(blocked & ~empty, float("-inf"))
        weights = scores.softmax(-1).masked_fill(blocked, 0.0)
        output = self.out_proj(self.merge(weights @ v))
        return Output(self.dropout(output), weights)

    def split(self, x: Tensor) -> Tensor:
        """Return (B, L, D) as (B, H, L, d_k)."""
        return x.view(*x.shape[:2], self.config.n_heads, self.config.head_dim).transpose(1, 2)

    def merge(self, x: Tensor) -> Tensor:
        """Return (B, H, L, d_k) as (B, L, D)."""
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], self.config.d_model)


implementation = from_module(
    VectorizedAttention,
    name="vectorized",
    parameters={"w_q": "q_proj", "w_k": "k_proj", "w_v": "v_proj", "w_o": "out_proj"},
    mask="keep",
    claims=Claims(
        masks={"bool", "float"},
        dropout="output",
        second_gradients=True,
        composes=COMPOSITIONS,
        dtypes=COMPUTE_DTYPES,
        rounding=Rounding(softmax_stored=False, log_normaliser=False, rescales=0),
    ),
)
