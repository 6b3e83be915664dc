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
from mha.implementations.formula import (
    Holder,
    allowed_by,
    capped,
    log_sum_exp,
    on_the_way,
    scores_of,
    sinks_of,
    weights_of,
)
from mha.spec import (
    Alibi,
    Claims,
    Config,
    Implementation,
    Options,
    Output,
    Rounding,
    Scores,
    Weights,
    Window,
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
    scores=Scores(
        scale="any",
        window=Window("left_right"),
        chunk=True,
        softcap="before_bias",
        sinks="float32",
        alibi=Alibi("signed", per_item=True),
    ),
    lengths="both",
    repeats="both",
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
    CLAIMS,
    dropout=False,
    extras=(),
    composes=(),
    decodes=False,
    decodes_ragged=False,
    cache_edits=frozenset(),
)
# The same with heads of their own width, so that CFG-1 and CFG-2 do not apply.
OWN_HEAD_DIM = replace(CLAIMS, own_head_dim=True)


class Correct(nn.Module):
    """A plain module with the default claims; each step is a method that a fault can override."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.config = Config(d_model, n_heads, bias=bias)
        self.config.validate()
        self.q_proj = nn.Linear(d_model, d_model, bias=bias)
        self.k_proj = nn.Linear(d_model, d_model, bias=bias)
        self.v_proj = nn.Linear(d_model, d_model, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Output:
        """Return the output (B, L, d_model) and the weights (B, H, L, S)."""
        options = Options(mask, is_causal)
        validate_call(self.config, query, key, value, options.mask, masks=("bool",))
        q, k, v = (
            self.split(x) for x in (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        )
        weights = self.weigh(self.score(q, k), self.allow(options, q, k))
        return Output(self.out_proj(self.merge(weights @ v)), weights)

    def split(self, x: Tensor) -> Tensor:
        """Split (B, N, d_model) into heads (B, H, N, d_k)."""
        return x.unflatten(-1, (self.config.n_heads, self.config.head_dim)).transpose(1, 2)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scaled scores (B, H, L, S)."""
        return q @ k.transpose(-1, -2) / math.sqrt(self.config.head_dim)

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        """Return mask and causal flag as one boolean mask (B, H, L, S); True = may attend."""
        return allowed_by(options, _like_scores(q, k))[0]

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """Return the softmax over the allowed keys (B, H, L, S); an empty row gets zeros."""
        return weights_of(scores, allowed)

    def merge(self, x: Tensor) -> Tensor:
        """Concatenate the heads (B, H, L, d_k) to (B, L, d_model)."""
        return x.transpose(1, 2).flatten(2)


class Complete(Holder):
    """Attention with every option of `Config` and everything that the contract recommends.

    scale: what the scores are multiplied by where the call does not say so; None for 1/sqrt(d_k).
    options: of the last call.
    claims: those of the implementation.
    does: how queries and keys are normed and rotated, if not as claimed.
    """

    scale: float | None = None
    options = Options()
    claims = CLAIMS
    does: Claims | None = None

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__()
        config.validate()
        self.config = config
        self.hold(weights.named())

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Output:
        """Attend to inputs (B, N, width), and return the output in the layout given."""
        options = self.options = Options(**given)
        if query.ndim == 2:
            batched = self.attend(query[None], key[None], value[None], options)
            return Output(batched.output[0], batched.weights)
        if self.config.length_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        output, weights, lse = self.attend(query, key, value, options)
        if self.config.length_first:
            output = output.transpose(0, 1)
        return Output(output, weights, lse)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        """Return the output (B, L, d_model), and on request the weights before dropout."""
        validate_call(self.config, query, key, value, options.mask)
        q, k = self.split(self.project(query, "q")), self.split(self.project(key, "k"))
        q, k = self.on_the_way(q, "q"), self.on_the_way(k, "k")
        v = self.split_value(self.project(value, "v"))
        allowed, bias = self.allow(options, q, k)
        k, v = self.extend(k, "extra_k"), self.extend(v, "extra_v")
        more = k.shape[2] - key.shape[1]
        allowed, bias = F.pad(allowed, (0, more), value=True), F.pad(bias, (0, more))
        k, v = self.repeat(k), self.repeat(v)
        scores = self.cap(self.score(q, k), bias)
        weights = self.weigh(scores, allowed)
        output = self.project(self.merge(self.combine(self.drop(weights), v, allowed)), "o")
        lse = self.log_sum_exp(scores, allowed) if options.return_lse else None
        return Output(output, weights if options.need_weights else None, lse)

    def project(self, x: Tensor, role: str) -> Tensor:
        """Apply the projection of a role, "q", "k", "v" or "o"."""
        return F.linear(x, getattr(self, f"w_{role}"), getattr(self, f"b_{role}", None))

    def split(self, x: Tensor) -> Tensor:
        """Split (B, N, heads * d_k) into heads (B, heads, N, d_k)."""
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def on_the_way(self, heads: Tensor, role: str) -> Tensor:
        """Return queries or keys ("q", "k") as the scores get them, (B, heads, N, d_k)."""
        weight = getattr(self, f"{role}_norm", None)
        return on_the_way(heads, self.does or self.claims, weight, self.positions(heads))

    def split_value(self, x: Tensor) -> Tensor:
        """Split values (B, N, heads * d_v) into heads (B, heads, N, d_v)."""
        if self.config.d_value is None:
            return self.split(x)
        return x.unflatten(-1, (-1, self.config.d_value)).transpose(1, 2)

    def extend(self, x: Tensor, name: str) -> Tensor:
        """Append the learned extra key or value, and the zero one, where configured."""
        if self.config.bias_kv:
            extra = getattr(self, name).unflatten(0, (-1, 1, self.config.head_dim))
            x = torch.cat([x, extra.expand(x.shape[0], -1, -1, -1)], 2)
        if self.config.zero_key:
            return F.pad(x, (0, 0, 0, 1))
        return x

    def repeat(self, x: Tensor) -> Tensor:
        """Repeat the key/value heads, so that there are as many as query heads."""
        return x.repeat_interleave(self.config.n_heads // self.config.kv_heads, 1)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scaled scores (B, H, L, S)."""
        usual = self.config.head_dim**-0.5 if self.scale is None else self.scale
        return scores_of(q, k, self.options, usual)

    def cap(self, scores: Tensor, bias: Tensor) -> Tensor:
        """Return the scores with the cap of the call, and the float mask added, (B, H, L, S)."""
        return capped(scores, self.options.softcap) + bias

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return what may attend, and what is added to the scores, both (B, H, L, S)."""
        return allowed_by(options, _like_scores(q, k))

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """Return the softmax over the allowed keys (B, H, L, S); an empty row gets zeros."""
        return weights_of(scores, allowed, sinks=self.sinks(scores))

    def sinks(self, scores: Tensor) -> Tensor | None:
        """Return the sinks of the call, (H,), as they are added to the denominators."""
        return sinks_of(self.options, scores)

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """Return the log-sum-exp of each row, (B, H, L), in float32 at least."""
        return log_sum_exp(
            scores.to(torch.promote_types(scores.dtype, torch.float32)), allowed, self.sinks(scores)
        )

    def drop(self, weights: Tensor) -> Tensor:
        """Apply dropout to the weights."""
        return F.dropout(weights, self.config.dropout, self.training)

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        """Return the contexts (B, H, L, d_k); values hidden from every query are not read."""
        return weights @ v.masked_fill(~allowed.any(2).unsqueeze(-1), 0.0)


def _like_scores(q: Tensor, k: Tensor) -> Tensor:
    """Return zeros of the shape (B, H, L, S)."""
    return q.new_zeros(()).expand(*q.shape[:3], k.shape[2])


@dataclass(frozen=True, eq=False)
class Direct:
    """A subclass of `Complete` as an implementation, built from configuration and weights."""

    cls: type[Complete]
    claims: Claims = CLAIMS

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.cls.__name__

    def build(
        self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str
    ) -> Complete:
        """Build the module with the weights in a dtype, on a device."""
        built = self.cls(config, weights.to(dtype, device))
        built.claims = self.claims
        return built


def implementation_of(cls: type[nn.Module], claims: Claims | None = None) -> Implementation:
    """Return a subclass of `Complete` or `Correct` as an implementation, with claims of that base.

    So is a subclass of `OnRank`, on ranks.
    """
    if issubclass(cls, OnRank):
        return Spmd(cls, claims or Spmd.claims)
    if issubclass(cls, Complete):
        return Direct(cls, claims or CLAIMS)
    return from_module(cls, name=cls.__name__, parameters=PARAMETERS, claims=claims or Claims())


correct = implementation_of(Correct)
complete = Direct(Complete)
