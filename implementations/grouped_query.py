"""Fewer key/value heads than query heads: each is shared by a group of query heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mha.implementations.adapters.module import from_module
from mha.spec import Claims, Config, Output, Rounding, validate_call
from mha.spec.claims import COMPOSITIONS, COMPUTE_DTYPES


class GroupedQueryAttention(nn.Module):
    """Ainslie et al. 2023, and Shazeer 2019 for one key/value head, multi-query attention.

    Keys and values are not repeated in memory.
    """

    def __init__(
        self, d_model: int, n_heads: int, n_kv_heads: int | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        self.config = Config(d_model, n_heads, n_kv_heads, bias=bias)
        self.config.validate()
        kv_width = self.config.kv_heads * self.config.head_dim
        self.query = nn.Linear(d_model, d_model, bias=bias)
        self.key = nn.Linear(d_model, kv_width, bias=bias)
        self.value = nn.Linear(d_model, kv_width, bias=bias)
        self.output = nn.Linear(d_model, d_model, bias=bias)

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
        width = self.config.head_dim
        kv_heads = self.config.kv_heads
        # g: the key/value heads; r: the query heads that share one.
        groups = kv_heads, self.config.n_heads // kv_heads
        q = self.query(query).unflatten(-1, (*groups, width))
        k = self.key(key).unflatten(-1, (kv_heads, width))
        v = self.value(value).unflatten(-1, (kv_heads, width))
        scores = torch.einsum("blgrd,bsgd->bgrls", q, k).flatten(1, 2) / math.sqrt(width)
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
        if is_causal:
            allowed = allowed.tril()
        if mask is not None:
            allowed = allowed & mask
        # A row without an allowed key keeps its scores in the softmax, which would be NaN if all
        # were -infinity.
        empty = ~allowed.any(-1, keepdim=True)
        scores = scores.masked_fill(~(allowed | empty), -math.inf)
        weights = scores.softmax(-1).masked_fill(~allowed, 0.0)
        context = torch.einsum("bgrls,bsgd->blgrd", weights.unflatten(1, groups), v)
        return Output(self.output(context.flatten(2)), weights)


implementation = from_module(
    GroupedQueryAttention,
    name="grouped_query",
    parameters={"w_q": "query", "w_k": "key", "w_v": "value", "w_o": "output"},
    mask="keep",
    claims=Claims(
        grouped_query=True,
        second_gradients=True,
        composes=COMPOSITIONS,
        dtypes=COMPUTE_DTYPES,
        rounding=Rounding(softmax_stored=False, log_normaliser=False, rescales=0),
    ),
)
