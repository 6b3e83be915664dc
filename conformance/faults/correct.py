"""The base of the faults: a correct implementation, in steps that a fault may replace."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mha.spec import Config, Output, causal_mask, validate_call

PARAMETERS = {"w_q": "q_proj", "w_k": "k_proj", "w_v": "v_proj", "w_o": "out_proj"}


class Correct(nn.Module):
    """The base of every fault: correct, in steps that a fault may replace."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.config = Config(d_model, n_heads, bias=bias)
        self.config.validate()
        self.q_proj = nn.Linear(d_model, d_model, bias=bias)
        self.k_proj = nn.Linear(d_model, d_model, bias=bias)
        self.v_proj = nn.Linear(d_model, d_model, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Output:
        validate_call(self.config, query, key, value, mask, masks=("bool",))
        q, k, v = (self.split(x) for x in (self.q_proj(query), self.k_proj(key), self.v_proj(value)))
        weights = self.weigh(self.score(q, k), self.allow(mask, is_causal, q, k))
        return Output(self.out_proj(self.merge(weights @ v)), weights)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.n_heads, self.config.head_dim)).transpose(1, 2)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / math.sqrt(self.config.head_dim)

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        allowed = torch.ones((q.shape[0], q.shape[1], q.shape[2], k.shape[2]), dtype=torch.bool)
        if mask is not None:
            allowed = allowed & mask
        return allowed & causal_mask(q.shape[2], k.shape[2], "top_left") if is_causal else allowed

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        empty = ~allowed.any(-1, keepdim=True)
        return scores.masked_fill(~(allowed | empty), -math.inf).softmax(-1).masked_fill(~allowed, 0.0)

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)
