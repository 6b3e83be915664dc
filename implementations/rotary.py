"""Rotary positions, and a norm of queries and keys, as in the decoders of today."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mha.implementations.adapters.module import from_module
from mha.spec import Claims, Config, QkNorm, Rotary, Rounding, validate_call
from mha.spec.claims import CACHE_EDITS, COMPUTE_DTYPES

BASE = 10000.0
EPS = 1e-6


class Cache(NamedTuple):
    """Rotated keys, and values, of the tokens so far, (B, n_kv_heads, size, d_k) each."""

    keys: Tensor
    values: Tensor


class RootMeanSquareNorm(nn.Module):
    """Zhang and Sennrich 2019, in float32 at least."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Divide the last axis by its root mean square, and multiply it by the weight."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        root = (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return (wide * root).to(x.dtype) * self.weight


class RotaryAttention(nn.Module):
    """Self-attention with rotary positions (Su et al. 2021, section 3.2.2).

    qk_norm: queries and keys of each head are normed before they are rotated (Henry et al. 2020).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        bias: bool = True,
        qk_norm: bool = True,
    ) -> None:
        super().__init__()
        self.config = Config(d_model, n_heads, n_kv_heads, bias=bias)
        self.config.validate()
        width = self.config.head_dim
        if width % 2:
            raise ValueError(f"the width of a head must be even, but is {width}")
        self.query = nn.Linear(d_model, d_model, bias=bias)
        self.key = nn.Linear(d_model, self.config.kv_heads * width, bias=bias)
        self.value = nn.Linear(d_model, self.config.kv_heads * width, bias=bias)
        self.output = nn.Linear(d_model, d_model, bias=bias)
        self.query_norm = RootMeanSquareNorm(width) if qk_norm else nn.Identity()
        self.key_norm = RootMeanSquareNorm(width) if qk_norm else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return the output (B, L, D).

        x: (B, L, D).
        mask: boolean, broadcastable to (B, H, L, L), True = may attend.
        """
        validate_call(self.config, x, x, x, mask, masks=("bool",))
        length = x.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool, device=x.device)
        if is_causal:
            allowed = allowed.tril()
        if mask is not None:
            allowed = allowed & mask
        k, v = self.keys_and_values(x, x, 0)
        return self.attend(self.queries(x, 0), k, v, allowed)

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Cache | None = None
    ) -> tuple[Tensor, Cache]:
        """Attend from each of n tokens to itself and those before it, (B, n, D) each.

        Return the output (B, n, D) and the new cache, whose positions they continue.
        """
        validate_call(self.config, query, key, value)
        before = 0 if cache is None else cache.keys.shape[2]
        k, v = self.keys_and_values(key, value, before)
        if cache is not None:
            k, v = torch.cat([cache.keys, k], 2), torch.cat([cache.values, v], 2)
        allowed = torch.ones(query.shape[1], k.shape[2], dtype=torch.bool, device=k.device)
        output = self.attend(self.queries(query, before), k, v, allowed.tril(before))
        return output, Cache(k, v)

    def reorder_cache(self, cache: Cache, items: Tensor) -> Cache:
        """Return the cache whose item b is the item `items[b]`; items: (B,)."""
        return Cache(cache.keys[items], cache.values[items])

    def crop_cache(self, cache: Cache, length: int) -> Cache:
        """Return the cache of the first tokens."""
        return Cache(cache.keys[:, :, :length], cache.values[:, :, :length])

    def queries(self, x: Tensor, start: int) -> Tensor:
        """Return the normed and rotated queries, (B, H, L, d_k), of positions from `start` on."""
        return rotated(self.query_norm(self.split(self.query(x))), start)

    def keys_and_values(self, key: Tensor, value: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return normed and rotated keys, and values, (B, n_kv_heads, L, d_k) each."""
        k = rotated(self.key_norm(self.split(self.key(key))), start)
        return k, self.split(self.value(value))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        """Return the output (B, L, D) for boolean `allowed`, broadcastable to (B, H, L, S)."""
        repeats = self.config.n_heads // self.config.kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = q @ k.mT / math.sqrt(self.config.head_dim)
        # A row without an allowed key keeps its scores in the softmax, which would be NaN if all
        # were -infinity.
        empty = ~allowed.any(-1, keepdim=True)
        scores = scores.masked_fill(~(allowed | empty), -math.inf)
        weights = scores.softmax(-1).masked_fill(~allowed, 0.0)
        output: Tensor = self.output((weights @ v).transpose(1, 2).flatten(2))
        return output

    def split(self, x: Tensor) -> Tensor:
        """Return (B, L, heads * d_k) as (B, heads, L, d_k)."""
        heads: Tensor = x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        return heads


def rotated(x: Tensor, start: int) -> Tensor:
    """Rotate heads (B, heads, L, d_k) by their positions, which count from `start`.

    Column m and column m + d_k / 2 are turned by the position times BASE^(-2m / d_k).
    """
    width, dtype = x.shape[-1], torch.promote_types(x.dtype, torch.float32)
    frequencies = BASE ** (-torch.arange(0, width, 2, device=x.device, dtype=dtype) / width)
    positions = torch.arange(start, start + x.shape[2], device=x.device, dtype=dtype)
    angles = positions.unsqueeze(-1) * frequencies
    first, second = x.to(dtype).chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


implementation = from_module(
    RotaryAttention,
    name="rotary",
    parameters={
        "w_q": "query",
        "w_k": "key",
        "w_v": "value",
        "w_o": "output",
        "q_norm": "query_norm.weight",
        "k_norm": "key_norm.weight",
    },
    mask="keep",
    claims=Claims(
        cross_attention=False,
        returns_weights=False,
        grouped_query=True,
        rotary=Rotary(base=BASE),
        qk_norm=QkNorm(eps=EPS),
        decodes="chunks",
        cache_edits=CACHE_EDITS,
        second_gradients=True,
        composes={"compile", "func", "autocast", "deterministic"},
        dtypes=COMPUTE_DTYPES,
        rounding=Rounding(
            softmax_stored=False, log_normaliser=False, rescales=0, heads_in_float32=False
        ),
    ),
)
