"""The correct classes that a fault derives from, and how a class becomes an implementation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha.conformance.faults.ranks import OnRank, Spmd
from mha.implementations import from_module
from mha.spec import (
    Claims,
    Config,
    Implementation,
    Options,
    Output,
    Rounding,
    Scores,
    Weights,
    causal_mask,
    validate_call,
)
from mha.spec.claims import CACHE_EDITS, COMPOSITIONS, COMPUTE_DTYPES, EXTRAS

# Where the weights of `Correct` are.
PARAMETERS = {"w_q": "q_proj", "w_k": "k_proj", "w_v": "v_proj", "w_o": "out_proj"}
# Everything that `Complete` can do.
CLAIMS = Claims(
    masks={"bool", "float"},
    dropout=True,
    grouped_query=True,
    kv_widths=True,
    scores=Scores(scale="any"),
    second_gradients=True,
    decodes="chunks",
    decodes_ragged=True,
    cache_edits=set(CACHE_EDITS),
    composes=set(COMPOSITIONS),
    extras=set(EXTRAS),
    dtypes=set(COMPUTE_DTYPES),
    rounding=Rounding(log_normaliser=False, rescales=0),
)
# Those of a class that is called, without dropout, and no more.
CALLED = replace(
    CLAIMS, dropout=False, extras=(), composes=(), decodes=False, decodes_ragged=False, cache_edits=frozenset()
)
# The same with heads of their own width, so that CFG-1 and CFG-2 do not apply.
OWN_HEAD_DIM = replace(CLAIMS, own_head_dim=True)


class Correct(nn.Module):
    """A plain module with the default claims; each step of the formula is a method that a fault can override."""

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
        """Return the output (B, L, d_model) and the weights (B, H, L, S)."""
        validate_call(self.config, query, key, value, mask, masks=("bool",))
        q, k, v = (self.split(x) for x in (self.q_proj(query), self.k_proj(key), self.v_proj(value)))
        weights = self.weigh(self.score(q, k), self.allow(mask, is_causal, q, k))
        return Output(self.out_proj(self.merge(weights @ v)), weights)

    def split(self, x: Tensor) -> Tensor:
        """Split (B, N, d_model) into heads (B, H, N, d_k)."""
        return x.unflatten(-1, (self.config.n_heads, self.config.head_dim)).transpose(1, 2)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scaled scores (B, H, L, S)."""
        return q @ k.transpose(-1, -2) / math.sqrt(self.config.head_dim)

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        """Return the mask and the causal flag as one boolean mask (B, H, L, S); True = may attend."""
        allowed = torch.ones((q.shape[0], q.shape[1], q.shape[2], k.shape[2]), dtype=torch.bool, device=q.device)
        if mask is not None:
            allowed = allowed & mask
        return allowed & causal_mask(q.shape[2], k.shape[2], "top_left", q.device) if is_causal else allowed

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """Return the softmax over the allowed keys (B, H, L, S); an empty row gets zeros."""
        empty = ~allowed.any(-1, keepdim=True)
        return scores.masked_fill(~(allowed | empty), -math.inf).softmax(-1).masked_fill(~allowed, 0.0)

    def merge(self, x: Tensor) -> Tensor:
        """Concatenate the heads (B, H, L, d_k) to (B, L, d_model)."""
        return x.transpose(1, 2).flatten(2)


class Complete(nn.Module):
    """Attention with every option of `Config` and everything that the contract only recommends, in steps as well.

    scale: what the scores are multiplied by; None for 1/sqrt(d_k). given_scale: what the call says, if anything.
    returns_lse: whether it asks for the log-sum-exp.
    """

    scale: float | None = None
    given_scale: float | None = None
    returns_lse = False

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__()
        config.validate()
        self.config = config
        for name, tensor in weights.named():
            self.register_parameter(name, nn.Parameter(tensor.detach().clone()))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
        **scores: Any,
    ) -> Output:
        """Bring the inputs to (B, N, width), attend, and return the output in the layout of the inputs."""
        options = Options(**scores)
        self.given_scale, self.returns_lse = options.scale, bool(options.return_lse)
        if query.ndim == 2:
            batched = self.attend(query[None], key[None], value[None], mask, is_causal, need_weights)
            return Output(batched.output[0], batched.weights)
        if self.config.length_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        output, weights, lse = self.attend(query, key, value, mask, is_causal, need_weights)
        return Output(output.transpose(0, 1) if self.config.length_first else output, weights, lse)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, need_weights: bool
    ) -> Output:
        """Return the output (B, L, d_model), and the weights before dropout (B, H, L, S) if they are requested."""
        validate_call(self.config, query, key, value, mask)
        q, k = self.split(self.project(query, "q")), self.split(self.project(key, "k"))
        v = self.split_value(self.project(value, "v"))
        allowed, bias = self.allow(mask, is_causal, q, k)
        k, v = self.extend(k, "extra_k"), self.extend(v, "extra_v")
        more = k.shape[2] - key.shape[1]
        allowed, bias = F.pad(allowed, (0, more), value=True), F.pad(bias, (0, more))
        k, v = self.repeat(k), self.repeat(v)
        scores = self.score(q, k) + bias
        weights = self.weigh(scores, allowed)
        output = self.project(self.merge(self.combine(self.drop(weights), v, allowed)), "o")
        lse = self.log_sum_exp(scores, allowed) if self.returns_lse else None
        return Output(output, weights if need_weights else None, lse)

    def project(self, x: Tensor, role: str) -> Tensor:
        """Apply the projection of a role, "q", "k", "v" or "o"."""
        return F.linear(x, getattr(self, f"w_{role}"), getattr(self, f"b_{role}", None))

    def split(self, x: Tensor) -> Tensor:
        """Split (B, N, heads * d_k) into heads (B, heads, N, d_k)."""
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def split_value(self, x: Tensor) -> Tensor:
        """Split values (B, N, heads * d_v) into heads (B, heads, N, d_v)."""
        if self.config.d_value is None:
            return self.split(x)
        return x.unflatten(-1, (-1, self.config.d_value)).transpose(1, 2)

    def extend(self, x: Tensor, name: str) -> Tensor:
        """Append the learned extra key or value, and the zero one, if the configuration has them."""
        if self.config.bias_kv:
            extra = getattr(self, name).unflatten(0, (-1, 1, self.config.head_dim))
            x = torch.cat([x, extra.expand(x.shape[0], -1, -1, -1)], 2)
        return F.pad(x, (0, 0, 0, 1)) if self.config.zero_key else x

    def repeat(self, x: Tensor) -> Tensor:
        """Repeat the key/value heads, so that there are as many as query heads."""
        return x.repeat_interleave(self.config.n_heads // self.config.kv_heads, 1)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scaled scores (B, H, L, S)."""
        if self.given_scale is not None:
            return q @ k.mT * self.given_scale
        return q @ k.mT / math.sqrt(self.config.head_dim) if self.scale is None else q @ k.mT * self.scale

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return what may attend, and what is added to the scores, both (B, H, L, S)."""
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        allowed, bias = torch.ones((), dtype=torch.bool, device=q.device), q.new_zeros(())
        if mask is not None and mask.dtype == torch.bool:
            allowed = mask
        elif mask is not None:
            allowed = mask != -math.inf
            bias = mask.masked_fill(~allowed, 0.0)
        if is_causal:
            allowed = allowed & causal_mask(*shape[2:], "top_left", q.device)
        return allowed.expand(shape), bias.expand(shape)

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """Return the softmax over the allowed keys (B, H, L, S); an empty row gets zeros."""
        empty = ~allowed.any(-1, keepdim=True)
        return scores.masked_fill(~(allowed | empty), -math.inf).softmax(-1).masked_fill(~allowed, 0.0)

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """Return the log-sum-exp of each row, (B, H, L), in float32 at least."""
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return wide.masked_fill(~allowed, -math.inf).logsumexp(-1)

    def drop(self, weights: Tensor) -> Tensor:
        """Apply dropout to the weights."""
        return F.dropout(weights, self.config.dropout, self.training)

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        """Return the contexts (B, H, L, d_k); values that no query may attend to are not read, so their NaN is not."""
        return weights @ v.masked_fill(~allowed.any(2).unsqueeze(-1), 0.0)

    def merge(self, x: Tensor) -> Tensor:
        """Concatenate the heads (B, H, L, d_k) to (B, L, d_model)."""
        return x.transpose(1, 2).flatten(2)

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None, active: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Attend from n new positions (B, n, width) to those before each; return the output and the new cache.

        active: the items (B,) that the position belongs to; all by default.
        cache: the keys and values (B, n, width) so far, and which positions belong to which items (B, n).
        """
        count = query.shape[1]
        present = query.new_ones(len(query), 1, dtype=torch.bool) if active is None else active[:, None]
        present = present.expand(-1, count)
        new = key, value, present
        cache = new if cache is None else tuple(torch.cat(pair, 1) for pair in zip(cache, new, strict=True))
        key, value, present = cache
        allowed = present[:, None, None] & causal_mask(count, present.shape[1], "bottom_right", query.device)
        return self(query, key, value, mask=allowed).output, cache

    def reorder_cache(self, cache: Any, items: Tensor) -> Any:
        """Return the cache of the items at these places."""
        return tuple(part[items] for part in cache)

    def crop_cache(self, cache: Any, length: int) -> Any:
        """Return the cache of the first positions."""
        return tuple(part[:, :length] for part in cache)

    def weight_gradients(self) -> dict[str, Tensor]:
        """Return the gradient of each weight by its name in `Weights`, zeros if it has none."""
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.named_parameters()}


@dataclass(frozen=True, eq=False)
class Direct:
    """A subclass of `Complete` as an implementation; it takes the contract's configuration and weights as they are."""

    cls: type[Complete]
    claims: Claims = CLAIMS

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.cls.__name__

    def build(self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str) -> Complete:
        """Build the module with the weights in a dtype, on a device."""
        return self.cls(config, weights.to(dtype, device))


def implementation_of(cls: type[nn.Module], claims: Claims | None = None) -> Implementation:
    """Return a subclass of `Complete` or `Correct` as an implementation, with the claims of that base by default.

    So is a subclass of `OnRank`, on ranks.
    """
    if issubclass(cls, OnRank):
        return Spmd(cls, claims or Spmd.claims)
    if issubclass(cls, Complete):
        return Direct(cls, claims or CLAIMS)
    return from_module(cls, name=cls.__name__, parameters=PARAMETERS, claims=claims or Claims())


correct = implementation_of(Correct)
complete = Direct(Complete)
