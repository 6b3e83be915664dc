"""Decoding with a cache of keys and values; each item of the batch has as many as it has tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha.implementations.adapters.module import from_module
from mha.spec import Claims, Config, Rounding, validate_call


class Cache(NamedTuple):
    """Keys and values (B, H, places, d_k), of which the first `lengths[b]` are those of item b; lengths: (B,)."""

    keys: Tensor
    values: Tensor
    lengths: Tensor

    @property
    def filled(self) -> Tensor:
        """Which places hold a key: (B, places)."""
        places = torch.arange(self.keys.shape[2], device=self.lengths.device)
        return places < self.lengths.unsqueeze(-1)

    def append(self, key: Tensor, value: Tensor, active: Tensor) -> Cache:
        """Return the cache with one more place, and a key and a value, (B, H, 1, d_k), for the active items, (B,)."""
        keys, values = F.pad(self.keys, (0, 0, 0, 1)), F.pad(self.values, (0, 0, 0, 1))
        places = torch.arange(keys.shape[2], device=self.lengths.device)
        new = ((places == self.lengths.unsqueeze(-1)) & active.unsqueeze(-1))[:, None, :, None]
        return Cache(key.where(new, keys), value.where(new, values), self.lengths + active)


class CachedAttention(nn.Module):
    """Attention over whole sequences, and from token to token (Shazeer 2019, section 2.4)."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.config = Config(d_model, n_heads, bias=bias)
        self.config.validate()
        self.query = nn.Linear(d_model, d_model, bias=bias)
        self.key = nn.Linear(d_model, d_model, bias=bias)
        self.value = nn.Linear(d_model, d_model, bias=bias)
        self.output = nn.Linear(d_model, d_model, bias=bias)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend: query (B, L, D), key and value (B, S, D), mask broadcastable to (B, H, L, S), True = may attend."""
        validate_call(self.config, query, key, value, mask, masks=("bool",))
        allowed = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device)
        allowed = allowed.tril() if is_causal else allowed
        allowed = allowed if mask is None else allowed & mask
        return self.attend(self.split(self.query(query)), *self.keys_and_values(key, value), allowed)

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Cache | None = None, active: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        """Attend from one token to those before it and itself: query, key and value (B, 1, D), the output too.

        cache: of the tokens before; none at first. active: (B,), False for an item that has no token now: its cache
        stays as it is, and its output means nothing.
        """
        validate_call(self.config, query, key, value)
        k, v = self.keys_and_values(key, value)
        batch = query.shape[0]
        if cache is None:
            cache = Cache(k[:, :, :0], v[:, :, :0], torch.zeros(batch, dtype=torch.long, device=k.device))
        everyone = torch.ones(batch, dtype=torch.bool, device=k.device)
        cache = cache.append(k, v, everyone if active is None else active)
        allowed = cache.filled[:, None, None, :]
        return self.attend(self.split(self.query(query)), cache.keys, cache.values, allowed), cache

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        """Return the output (B, L, D) of heads (B, H, L, d_k) and (B, H, S, d_k)."""
        scores = q @ k.mT / math.sqrt(self.config.head_dim)
        empty = ~allowed.any(-1, keepdim=True)
        weights = scores.masked_fill(~(allowed | empty), -math.inf).softmax(-1).masked_fill(~allowed, 0.0)
        output: Tensor = self.output((weights @ v).transpose(1, 2).flatten(2))
        return output

    def keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Project and split, both."""
        return self.split(self.key(key)), self.split(self.value(value))

    def split(self, x: Tensor) -> Tensor:
        """(B, L, D) to (B, H, L, d_k)."""
        heads: Tensor = x.unflatten(-1, (self.config.n_heads, self.config.head_dim))
        return heads.transpose(1, 2)


implementation = from_module(
    CachedAttention,
    name="kv_cache",
    parameters={"w_q": "query", "w_k": "key", "w_v": "value", "w_o": "output"},
    mask="keep",
    claims=Claims(
        returns_weights=False,
        decodes=True,
        decodes_ragged=True,
        composes={"compile", "export", "func", "autocast"},
        dtypes={"float64", "float32", "bfloat16", "float16"},
        rounding=Rounding(softmax_stored=False, log_normaliser=False),
    ),
)
