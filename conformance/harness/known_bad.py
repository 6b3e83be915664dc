"""Known wrong answers: attention with one twist, which a property must reject, or else its cases prove nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha.spec import Claims, Config, Output, Weights, causal_mask
from mha.spec.dtypes import computable

DEFECTS = {
    "zeros": "zeros, whatever the inputs are",
    "noise": "other random numbers at each call",
    "mean": "the mean of all values, without reading query, key or mask",
    "unmasked": "no mask is looked at, nor the causal flag",
    "unscaled": "scores are not scaled",
    "single": "computed in float32, whatever the dtype",
    "detached": "right, but nothing is differentiated through the keys",
    "unsummed": "right, but the gradient of the softmax leaves out the sum over the row",
    "unchecked": "right where there is an answer, but nothing is ever refused",
    "wild": "right, but every gradient is NaN",
    "erratic": "right, but gradients are other multiples of the right ones at each call",
    "none": "right",
}


@dataclass(eq=False)
class KnownBad:
    """Attention as `claims` have it, but for one of `TWISTS`."""

    name: str
    claims: Claims
    drawn: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def build(self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str) -> KnownBadAttention:
        """Build it; nothing is refused."""
        return KnownBadAttention(self.name, self.claims, config, weights, self.drawn)


class KnownBadAttention(nn.Module):
    """The textbook's attention, twisted."""

    def __init__(
        self, defect: str, claims: Claims, config: Config, weights: Weights, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.defect, self.claims, self.config = defect, claims, config
        for name, tensor in weights.named():
            self.register_parameter(name, nn.Parameter(tensor.detach().clone()))
        self.names = [name for name, _ in weights.named()]
        self.generator = generator

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
        """Attend, or not: see `TWISTS`."""
        if computable(query) is not query:
            inputs = (computable(x) for x in (query, key, value))
            mask = None if mask is None else computable(mask)
            output, weights = self(*inputs, mask=mask, is_causal=is_causal, need_weights=need_weights)
            return Output(output.to(query), None if weights is None else weights.to(query))
        if self.defect in ("zeros", "noise"):
            return self._made_up(query, key, value, need_weights)
        if self.defect in ("mean", "unmasked"):
            mask, is_causal = None, False
        if self.defect == "unchecked":
            key, value = (_fit(x, query, self.config.d_model) for x in (key, value))
            query = _fit(query, query, self.config.d_model)
        q, k, v = (self._project(x, role) for x, role in ((query, "q"), (key, "k"), (value, "v")))
        scale = 1.0 if self.defect == "unscaled" else 0.0 if self.defect == "mean" else self.config.head_dim**-0.5
        k = k.detach() if self.defect == "detached" else k
        scores = q @ k.mT * scale
        if self.defect == "single":
            q, k, v, scores = q.float(), k.float(), v.float(), scores.float()
        weights = self._softmax(scores, *self._allowed(mask, is_causal, scores))
        drops = "output" if self.claims.dropout == "output" else "weights"
        dropped = F.dropout(weights, self.config.dropout, self.training and drops == "weights")
        output = self._linear((dropped @ v).transpose(1, 2).flatten(2).to(query), "o")
        output = F.dropout(output, self.config.dropout, self.training and drops == "output")
        if self.defect in ("wild", "erratic") and output.requires_grad:
            factor = math.nan if self.defect == "wild" else float(torch.rand((), generator=self.generator))
            output.register_hook(lambda gradient: gradient * factor)
        return Output(output, weights.to(query) if need_weights else None)

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None, active: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """See `mha.spec.Decoder`; the cache has keys, values, and which of them are an item's own."""
        active = query.new_ones(len(query)).bool() if active is None else active
        own = active[:, None, None]
        new = key.where(own, 0), value.where(own, 0), own
        cache = new if cache is None else tuple(torch.cat(pair, 1) for pair in zip(cache, new, strict=True))
        key, value, present = cache
        return self(query, key, value, mask=present.mT.unsqueeze(1)).output, cache

    def weight_gradients(self) -> dict[str, Tensor]:
        """See `mha.spec.Differentiable`."""
        named = dict(self.named_parameters())
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name in self.names for p in (named[name],)}

    def _made_up(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool) -> Output:
        shape = (query.shape[0], self.config.n_heads, query.shape[1], key.shape[1]) if query.ndim == 3 else (1,)

        def made(size: Any) -> Tensor:
            drawn = torch.randn(size, generator=self.generator).to(query)
            return drawn * (1 + value.abs().max()) if self.defect == "noise" else drawn * 0

        touched = sum(x.sum() * 0 for x in (query, key, value, *map(computable, self.parameters())))
        return Output(made(query.shape) + touched, made(shape) if need_weights else None)

    def _project(self, x: Tensor, role: str) -> Tensor:
        width = self.config.head_dim
        projected = self._linear(x, role)
        heads: Tensor = projected.unflatten(-1, (projected.shape[-1] // width, width)).transpose(1, 2)
        return heads.repeat_interleave(self.config.n_heads // heads.shape[1], 1)

    def _linear(self, x: Tensor, role: str) -> Tensor:
        held = {name: computable(parameter) for name, parameter in self.named_parameters()}
        return F.linear(x, held[f"w_{role}"], held.get(f"b_{role}"))

    def _allowed(self, mask: Tensor | None, is_causal: bool, scores: Tensor) -> tuple[Tensor, Tensor]:
        """What may attend, and what is added to the scores."""
        allowed, bias = torch.ones_like(scores, dtype=torch.bool), torch.zeros_like(scores)
        if mask is not None and mask.dtype == scores.dtype:
            allowed, bias = allowed & (mask != -math.inf), mask.masked_fill(mask == -math.inf, 0.0)
        elif mask is not None:
            allowed = allowed & _fit_mask(mask.bool(), scores)
        if is_causal:
            alignment = self.claims.causal or "top_left"
            allowed = allowed & causal_mask(scores.shape[2], scores.shape[3], alignment, scores.device)
        return allowed, bias

    def _softmax(self, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        empty = ~allowed.any(-1, keepdim=True)
        scores = (scores + bias).masked_fill(~(allowed | empty), -math.inf)
        weights = scores.softmax(-1)
        if self.defect == "unsummed":
            weights = (scores - scores.amax(-1, keepdim=True).detach()).exp()
            weights = weights / weights.sum(-1, keepdim=True).detach()
        policy = self.claims.empty_row
        if policy == "uniform":
            return torch.where(empty, 1 / max(scores.shape[-1], 1), weights)
        weights = weights.masked_fill(~allowed, 0.0)
        return weights.masked_fill(empty, math.nan) if policy == "nan" else weights


def _fit(x: Tensor, like: Tensor, width: int) -> Tensor:
    """Take any input for one that fits: cut it or pad it to the width, and one item of it for the batch."""
    x = F.pad(x, (0, width - x.shape[-1]))
    return x if x.shape[0] == like.shape[0] else x[:1].expand(like.shape[0], -1, -1)


def _fit_mask(mask: Tensor, scores: Tensor) -> Tensor:
    """Take any mask for one that fits."""
    try:
        return mask.expand(scores.shape)
    except RuntimeError:
        return torch.ones_like(scores, dtype=torch.bool)
