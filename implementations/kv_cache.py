"""Decoding with a cache of keys and values; the items of a batch may differ in length."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha.implementations.adapters.module import from_module
from mha.spec import Claims, Config, Rounding, validate_call
from mha.spec.claims import CACHE_EDITS, COMPOSITIONS, COMPUTE_DTYPES


class Cache(NamedTuple):
    """The keys and values of the tokens so far.

    keys, values: (B, H, size, d_k); item b has the first `lengths[b]` of them. lengths: (B,).
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor

    @property
    def filled(self) -> Tensor:
        """Which positions hold a key: (B, size)."""
        positions = torch.arange(self.keys.shape[2], device=self.lengths.device)
        return positions < self.lengths.unsqueeze(-1)

    def append(self, key: Tensor, value: Tensor, active: Tensor) -> Cache:
        """Return the cache with n more keys and values (B, H, n, d_k) for each active item (B,)."""
        count = key.shape[2]
        keys, values = F.pad(self.keys, (0, 0, 0, count)), F.pad(self.values, (0, 0, 0, count))
        # Which of the new ones each position gets, in an item that has some already.
        positions = torch.arange(keys.shape[2], device=self.lengths.device)
        number = positions - self.lengths.unsqueeze(-1)
        is_new = (number >= 0) & (number < count) & active.unsqueeze(-1)
        is_new = is_new[:, None, :, None]
        number = number.clamp(0, count - 1)[:, None, :, None].expand_as(keys)
        keys = key.gather(2, number).where(is_new, keys)
        values = value.gather(2, number).where(is_new, values)
        return Cache(keys, values, self.lengths + count * active)


class CachedAttention(nn.Module):
    """Attention over whole sequences, and one token at a time (Shazeer 2019, section 2.4)."""

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
        allowed = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device)
        if is_causal:
            allowed = allowed.tril()
        if mask is not None:
            allowed = allowed & mask
        k, v = self.keys_and_values(key, value)
        return self.attend(self.split(self.query(query)), k, v, allowed)

    def decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Cache | None = None,
        active: Tensor | None = None,
    ) -> tuple[Tensor, Cache]:
        """Attend from each of n tokens to itself and those before it.

        Return the output (B, n, D) and the new cache.

        query, key, value: (B, n, D).
        cache: of the tokens before; None for the first.
        active: (B,), False for an item that has no token now: its cache does not change, and its
            output means nothing.
        """
        validate_call(self.config, query, key, value)
        k, v = self.keys_and_values(key, value)
        batch = query.shape[0]
        if cache is None:
            lengths = torch.zeros(batch, dtype=torch.long, device=k.device)
            cache = Cache(k[:, :, :0], v[:, :, :0], lengths)
        if active is None:
            active = torch.ones(batch, dtype=torch.bool, device=k.device)
        before = cache.lengths
        cache = cache.append(k, v, active)
        # The last position that each of the n tokens of an item sees is its own.
        own = before.unsqueeze(-1) + torch.arange(query.shape[1], device=k.device)
        not_later = torch.arange(cache.keys.shape[2], device=k.device) <= own.unsqueeze(-1)
        allowed = not_later.unsqueeze(1) & cache.filled[:, None, None, :]
        return self.attend(self.split(self.query(query)), cache.keys, cache.values, allowed), cache

    def reorder_cache(self, cache: Cache, items: Tensor) -> Cache:
        """Return the cache whose item b is the item `items[b]`; items: (B,)."""
        return Cache(cache.keys[items], cache.values[items], cache.lengths[items])

    def crop_cache(self, cache: Cache, length: int) -> Cache:
        """Return the cache of the first tokens, `length` of each item at most."""
        keys, values = cache.keys[:, :, :length], cache.values[:, :, :length]
        return Cache(keys, values, cache.lengths.clamp(max=length))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        """Return the output (B, L, D) of q (B, H, L, d_k), and k and v (B, H, S, d_k)."""
        scores = q @ k.mT / math.sqrt(self.config.head_dim)
        # A row without an allowed key keeps its scores in the softmax, which would be NaN if all
        # were -infinity.
        empty = ~allowed.any(-1, keepdim=True)
        scores = scores.masked_fill(~(allowed | empty), -math.inf)
        weights = scores.softmax(-1).masked_fill(~allowed, 0.0)
        output: Tensor = self.output((weights @ v).transpose(1, 2).flatten(2))
        return output

    def keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the heads of keys and values, (B, H, S, d_k) each."""
        return self.split(self.key(key)), self.split(self.value(value))

    def split(self, x: Tensor) -> Tensor:
        """Return (B, L, D) as (B, H, L, d_k)."""
        heads: Tensor = x.unflatten(-1, (self.config.n_heads, self.config.head_dim))
        return heads.transpose(1, 2)


implementation = from_module(
    CachedAttention,
    name="kv_cache",
    parameters={"w_q": "query", "w_k": "key", "w_v": "value", "w_o": "output"},
    mask="keep",
    claims=Claims(
        returns_weights=False,
        decodes="chunks",
        decodes_ragged=True,
        cache_edits=CACHE_EDITS,
        second_gradients=True,
        composes=COMPOSITIONS,
        dtypes=COMPUTE_DTYPES,
        rounding=Rounding(softmax_stored=False, log_normaliser=False, rescales=0),
    ),
)
