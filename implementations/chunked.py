"""Queries in chunks, which the backward pass computes again: memory grows with L + S."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mha.implementations.adapters.module import from_module
from mha.spec import Claims, Config, Rounding, validate_call
from mha.spec.claims import COMPUTE_DTYPES

CHUNK = 64


class ChunkedAttention(nn.Module):
    """Rabe & Staats 2021, with chunks of queries only.

    The weights (B, H, chunk, S) of one chunk are in memory at a time, and not (B, H, L, S).
    """

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.config = Config(d_model, n_heads, bias=bias)
        self.config.validate()
        self.query = nn.Linear(d_model, d_model, bias=bias)
        self.key = nn.Linear(d_model, d_model, bias=bias)
        self.value = nn.Linear(d_model, d_model, bias=bias)
        self.output = nn.Linear(d_model, d_model, bias=bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return the output (B, L, D).

        query: (B, L, D); key, value: (B, S, D); mask: boolean, broadcastable to (B, H, L, S), True
        = may attend.
        """
        validate_call(self.config, query, key, value, mask, masks=("bool",))
        q = self.split(self.query(query))
        k = self.split(self.key(key))
        v = self.split(self.value(value))
        differs_by_query = mask is not None and mask.ndim > 1 and mask.shape[-2] > 1
        contexts = []
        for start in range(0, max(query.shape[1], 1), CHUNK):
            rows = slice(start, start + CHUNK)
            part = mask[..., rows, :] if mask is not None and differs_by_query else mask
            first = start if is_causal else None
            # The chunk's weights are not kept for the backward pass.
            context = checkpoint(attend, q[:, :, rows], k, v, part, first, use_reentrant=False)
            contexts.append(context)
        output: Tensor = self.output(torch.cat(contexts, 2).transpose(1, 2).flatten(2))
        return output

    def split(self, x: Tensor) -> Tensor:
        """Return (B, L, D) as (B, H, L, d_k)."""
        heads: Tensor = x.unflatten(-1, (self.config.n_heads, self.config.head_dim))
        return heads.transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, start: int | None) -> Tensor:
    """Return the context (B, H, chunk, d_k) of a chunk of queries.

    q: (B, H, chunk, d_k).
    k, v: (B, H, S, d_k).
    mask: broadcastable to (B, H, chunk, S).
    start: the position of the first query if the call is causal, else None.
    """
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    if start is not None:
        allowed = allowed.tril(start)
    if mask is not None:
        allowed = allowed & mask
    # A row without an allowed key keeps its scores in the softmax, which would be NaN if all
    # were -infinity.
    empty = ~allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~(allowed | empty), -math.inf)
    weights = scores.softmax(-1).masked_fill(~allowed, 0.0)
    return weights @ v


implementation = from_module(
    ChunkedAttention,
    name="chunked",
    parameters={"w_q": "query", "w_k": "key", "w_v": "value", "w_o": "output"},
    mask="keep",
    claims=Claims(
        returns_weights=False,
        second_gradients=True,
        composes={"compile", "autocast"},
        dtypes=COMPUTE_DTYPES,
        rounding=Rounding(softmax_stored=False, log_normaliser=False, rescales=0),
    ),
)
