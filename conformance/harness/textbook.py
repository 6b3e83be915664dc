"""The textbook's formula as a module, in steps that a known-bad answer overrides."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha.spec import Claims, Config, Lse, Options, Output, Weights, causal_mask
from mha.spec.claims import DROPS_OUTPUT
from mha.spec.dtypes import computable
from mha.spec.masks import join_causal

Inputs = tuple[Tensor, Tensor, Tensor]


class TextbookAttention(nn.Module):
    """Correct attention in steps, each of which a defect may override.

    allowed: what the masks of the last call allow, boolean (B, H, L, S). given_scale: that of the last call, if it has
    one. returns_lse: whether the last call asks for the log-sum-exp. joins_causal: the causal flag arrives as part of
    the mask, as where an adapter translates it.
    """

    allowed: Tensor
    given_scale: float | None = None
    returns_lse = False
    joins_causal = False

    def __init__(self, claims: Claims, config: Config, weights: Weights, generator: torch.Generator) -> None:
        super().__init__()
        self.claims, self.config, self.generator = claims, config, generator
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
        """Return the output (B, L, D), and the weights (B, H, L, S) if they are asked for."""
        options = Options(**scores)
        self.given_scale, self.returns_lse = options.scale, bool(options.return_lse)
        if computable(query) is not query:
            inputs = (computable(x) for x in (query, key, value))
            mask = None if mask is None else computable(mask)
            given = {"mask": mask, "is_causal": is_causal, "need_weights": need_weights, **scores}
            output, weights, lse = self(*inputs, **given)
            return Output(output.to(query), None if weights is None else weights.to(query), lse)
        return self.attend((query, key, value), mask, is_causal, need_weights)

    def attend(self, inputs: Inputs, mask: Tensor | None, is_causal: bool, need_weights: bool) -> Output:
        """Run the steps on inputs of a dtype that torch computes in."""
        q, k, v = (self.project(x, role) for x, role in zip(self.take(*inputs), "qkv", strict=True))
        scores = self.score(q, k)
        if is_causal and self.joins_causal:
            causal = causal_mask(scores.shape[2], scores.shape[3], self.claims.causal or "top_left", scores.device)
            mask, is_causal = join_causal(mask, causal[None, None]), False
        self.allowed, bias = self.allow(mask, is_causal, scores)
        weights = self.weigh(scores, self.allowed, bias)
        output = self.combine(weights, v, inputs[0])
        lse = self.log_sum_exp(scores + bias, self.allowed, inputs[0]) if self.returns_lse else None
        return Output(output, weights.to(inputs[0]) if need_weights else None, lse)

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None, active: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """See `mha.spec.Decoder`; the cache has keys, values, and which of them are an item's own."""
        active = query.new_ones(len(query)).bool() if active is None else active
        own = active[:, None, None].expand(-1, query.shape[1], -1)
        new = key.where(own, 0), value.where(own, 0), own
        cache = new if cache is None else tuple(torch.cat(pair, 1) for pair in zip(cache, new, strict=True))
        key, value, present = cache
        earlier = causal_mask(query.shape[1], key.shape[1], "bottom_right", query.device)
        return self(query, key, value, mask=present.mT.unsqueeze(1) & earlier).output, cache

    def reorder_cache(self, cache: Any, items: Tensor) -> Any:
        """See `mha.spec.CacheEditor`."""
        return tuple(part[items] for part in cache)

    def crop_cache(self, cache: Any, length: int) -> Any:
        """See `mha.spec.CacheEditor`."""
        return tuple(part[:, :length] for part in cache)

    def weight_gradients(self) -> dict[str, Tensor]:
        """See `mha.spec.Differentiable`."""
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.named_parameters()}

    def take(self, query: Tensor, key: Tensor, value: Tensor) -> Inputs:
        """Return the inputs to attend to."""
        return query, key, value

    def scale(self) -> float:
        """Return what the scores are multiplied by."""
        return self.claims.scale_for(self.config.head_dim) if self.given_scale is None else self.given_scale

    def project(self, x: Tensor, role: str) -> Tensor:
        """Return the heads (B, H, length, d_k) of an input; role: "q", "k" or "v"."""
        heads = self.split(self.linear(x, role), role)
        return self.repeat(heads, self.config.n_heads // heads.shape[1])

    def split(self, projected: Tensor, role: str) -> Tensor:
        """Split (B, length, heads * d_k) into heads (B, heads, length, d_k)."""
        width = self.config.width_of(role)
        heads: Tensor = projected.unflatten(-1, (projected.shape[-1] // width, width)).transpose(1, 2)
        return heads

    def repeat(self, heads: Tensor, times: int) -> Tensor:
        """Repeat each key/value head for the query heads that share it."""
        return heads.repeat_interleave(times, 1)

    def linear(self, x: Tensor, role: str) -> Tensor:
        """Multiply by W_role and add b_role, if there is one."""
        if not self.config.projected:
            return x
        bias = getattr(self, f"b_{role}", None)
        return F.linear(x, computable(getattr(self, f"w_{role}")), None if bias is None else computable(bias))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scores (B, H, L, S), without mask."""
        return q @ k.mT * self.scale()

    def allow(self, mask: Tensor | None, is_causal: bool, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return which keys are allowed, and what is added to the scores, both (B, H, L, S)."""
        allowed, bias = torch.ones_like(scores, dtype=torch.bool), torch.zeros_like(scores)
        if mask is not None and mask.dtype == scores.dtype:
            allowed, bias = allowed & (mask != -math.inf), mask.masked_fill(mask == -math.inf, 0.0)
        elif mask is not None:
            allowed = allowed & _fit_mask(mask.bool(), scores)
        if is_causal:
            alignment = self.claims.causal or "top_left"
            allowed = allowed & causal_mask(scores.shape[2], scores.shape[3], alignment, scores.device)
        return allowed, bias

    def weigh(self, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        """Return the weights (B, H, L, S), with empty rows as the claims have them."""
        empty = ~allowed.any(-1, keepdim=True)
        weights = self.softmax((scores + bias).masked_fill(~(allowed | empty), -math.inf))
        policy = self.claims.empty_row
        if policy == "uniform":
            return torch.where(empty, 1 / max(scores.shape[-1], 1), weights)
        weights = weights.masked_fill(~allowed, 0.0)
        return weights.masked_fill(empty, math.nan) if policy == "nan" else weights

    def log_sum_exp(self, scores: Tensor, allowed: Tensor, query: Tensor) -> Tensor:
        """Return the log-sum-exp of each row, (B, H, L), as the claims have it."""
        declared = self.claims.lse or Lse()
        lse = scores.masked_fill(~allowed, -math.inf).logsumexp(-1) / declared.log_base
        lse = lse.masked_fill(~allowed.any(-1), math.inf) if declared.empty == "+inf" else lse
        return lse.to(declared.dtypes_for(query.dtype)[-1])

    def softmax(self, scores: Tensor) -> Tensor:
        """Normalise the scores over the keys."""
        return scores.softmax(-1)

    def combine(self, weights: Tensor, v: Tensor, query: Tensor) -> Tensor:
        """Return the output (B, L, D) in the dtype of the query, with the dropout that is claimed."""
        claimed = self.claims.dropout
        dropped = F.dropout(weights, self.config.dropout, self.training and claimed != "output")
        output = self.linear(self.merge(dropped @ v).to(query), "o")
        return F.dropout(output, self.config.dropout_of_output, self.training and claimed in DROPS_OUTPUT)

    def merge(self, contexts: Tensor) -> Tensor:
        """Concatenate the heads (B, H, L, d_k) to (B, L, H * d_k)."""
        return contexts.transpose(1, 2).flatten(2)


def _fit_mask(mask: Tensor, scores: Tensor) -> Tensor:
    """Broadcast a mask to the scores, or allow everything if it cannot be."""
    try:
        return mask.expand(scores.shape)
    except RuntimeError:
        return torch.ones_like(scores, dtype=torch.bool)
