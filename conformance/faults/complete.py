"""A correct implementation that claims all that there is to claim, in steps that a fault may replace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha.spec import Claims, Config, Output, Rounding, Weights, causal_mask, validate_call
from mha.spec.claims import COMPOSITIONS, DTYPES, EXTRAS

CLAIMS = Claims(
    masks={"bool", "float"},
    dropout=True,
    grouped_query=True,
    kv_widths=True,
    decodes=True,
    decodes_ragged=True,
    composes=set(COMPOSITIONS),
    extras=set(EXTRAS),
    dtypes=set(DTYPES),
    rounding=Rounding(log_normaliser=False),
)


class Complete(nn.Module):
    """Attention with every option of `Config`, and with what the contract only recommends."""

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
    ) -> Output:
        if query.ndim == 2:
            batched = self.attend(query[None], key[None], value[None], mask, is_causal, need_weights)
            return Output(batched.output[0], batched.weights)
        if self.config.length_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        output, weights = self.attend(query, key, value, mask, is_causal, need_weights)
        return Output(output.transpose(0, 1) if self.config.length_first else output, weights)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, need_weights: bool
    ) -> Output:
        validate_call(self.config, query, key, value, mask)
        q, k, v = (self.split(self.project(x, role)) for x, role in ((query, "q"), (key, "k"), (value, "v")))
        allowed, bias = self.allow(mask, is_causal, q, k)
        k, v = self.extend(k, "extra_k"), self.extend(v, "extra_v")
        more = k.shape[2] - key.shape[1]
        allowed, bias = F.pad(allowed, (0, more), value=True), F.pad(bias, (0, more))
        k, v = self.repeat(k), self.repeat(v)
        weights = self.weigh(self.score(q, k) + bias, allowed)
        output = self.project(self.merge(self.combine(self.drop(weights), v, allowed)), "o")
        return Output(output, weights if need_weights else None)

    def project(self, x: Tensor, role: str) -> Tensor:
        return F.linear(x, getattr(self, f"w_{role}"), getattr(self, f"b_{role}", None))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def extend(self, x: Tensor, name: str) -> Tensor:
        """Put the extra key or value, and the zero one, after those of the input."""
        if self.config.bias_kv:
            extra = getattr(self, name).unflatten(0, (-1, 1, self.config.head_dim))
            x = torch.cat([x, extra.expand(x.shape[0], -1, -1, -1)], 2)
        return F.pad(x, (0, 0, 0, 1)) if self.config.zero_key else x

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.config.n_heads // self.config.kv_heads, 1)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / math.sqrt(self.config.head_dim)

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return what may attend, and what is added to the scores, both (B, H, L, S)."""
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        allowed, bias = torch.ones((), dtype=torch.bool), q.new_zeros(())
        if mask is not None and mask.dtype == torch.bool:
            allowed = mask
        elif mask is not None:
            allowed = mask != -math.inf
            bias = mask.masked_fill(~allowed, 0.0)
        if is_causal:
            allowed = allowed & causal_mask(*shape[2:], "top_left")
        return allowed.expand(shape), bias.expand(shape)

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        empty = ~allowed.any(-1, keepdim=True)
        return scores.masked_fill(~(allowed | empty), -math.inf).softmax(-1).masked_fill(~allowed, 0.0)

    def drop(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.config.dropout, self.training)

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        """Return the contexts (B, H, L, d_k); what no query may attend to is not read, so that NaN stays there."""
        return weights @ v.masked_fill(~allowed.any(2).unsqueeze(-1), 0.0)

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None, active: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The cache has keys, values, and for which items a place is one of their own."""
        new = key, value, torch.ones(len(query), 1, dtype=torch.bool) if active is None else active[:, None]
        cache = new if cache is None else tuple(torch.cat(pair, 1) for pair in zip(cache, new, strict=True))
        key, value, present = cache
        return self(query, key, value, mask=present[:, None, None]).output, cache

    def weight_gradients(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.named_parameters()}


@dataclass(frozen=True, eq=False)
class Direct:
    """A class like `Complete` as an implementation, without an adapter."""

    cls: type[Complete]
    claims: Claims = CLAIMS

    @property
    def name(self) -> str:
        return self.cls.__name__

    def build(self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str) -> Complete:
        return self.cls(config, weights.to(dtype, device))


complete = Direct(Complete)
