"""Correct implementations with other conventions and other arithmetic, which must pass."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.base import CLAIMS, Complete, Correct
from mha.conformance.properties.registry import Property, is_claimed
from mha.spec import (
    Alibi,
    Claims,
    Lse,
    Options,
    Output,
    Packed,
    QkNorm,
    Rotary,
    Rounding,
    Scores,
    causal_mask,
)

# What is claimed for properties about the way from projections to scores, by their need.
OF_HEADS: dict[str, dict[str, Any]] = {
    "rotary": {"rotary": Rotary()},
    "qk_norm": {"rotary": Rotary(), "qk_norm": QkNorm(eps=1e-2)},
}


def claims_for(prop: Property) -> Claims:
    """Return the claims of a complete implementation, changed as a property needs them."""
    claims = CLAIMS
    for need in prop.needs:
        name, _, value = need.partition("=")
        value = value.split("|")[0] or "True"
        if name == "world_sizes":
            claims = replace(claims, world_sizes={1, 2})
        if name.startswith("lse"):
            claims = replace(claims, lse=Lse(gradient=True))
        if name == "scores.alibi.built_in":
            claims = replace(claims, scores=Scores(alibi=Alibi("signed", built_in=True)))
        if name.startswith("packed"):
            claims = replace(claims, packed=Packed("zero", gaps=True))
        if need in OF_HEADS:
            claims = replace(claims, extras=(), **OF_HEADS[name])
        if name == "declares_softmax":
            claims = replace(claims, rounding=Rounding())
        if not is_claimed(claims, need):
            claims = replace(claims, **{name: {"True": True, "False": False}.get(value, value)})
    return claims


class NanForEmptyRow(Correct):
    """The policy "nan", filled in at the end: in the softmax, it would spoil gradients (MSK-9)."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Output:
        output, weights, _ = super().forward(query, key, value, mask, is_causal)
        empty = (weights == 0).all(-1, keepdim=True)
        return Output(
            output.masked_fill(empty.any(1), math.nan), weights.masked_fill(empty, math.nan)
        )


class NanContext(Complete):
    """The policy "nan", filled into the context: in the gradient of W_o, 0 * NaN is NaN."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return (
            super()
            .combine(weights, v, allowed)
            .masked_fill(~allowed.any(-1, keepdim=True), math.nan)
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        # #lizard forgives(parameter_count): the arguments of an attention
        output, weights, _ = super().attend(query, key, value, options)
        return Output(output, None if weights is None else weights / weights.any(-1, keepdim=True))


class AddsInfinity(Complete):
    """Hidden scores get -infinity added; the softmax and the weights are in float32."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        shown = allowed | ~allowed.any(-1, keepdim=True)
        added = scores + torch.zeros_like(scores).masked_fill(~shown, -math.inf)
        return added.softmax(-1, dtype=torch.float32).masked_fill(~allowed, 0.0)

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return super().combine(weights.to(v), v, allowed)


class RaisesForEmptyRow(Correct):
    """The policy "error"."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if not bool(allowed.any(-1).all()):
            raise ValueError("a query has no key to attend to")
        return super().weigh(scores, allowed)


class BottomRight(Correct):
    """Causal masks are aligned bottom right: the last query sees every key."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        allowed = super().allow(options.change(is_causal=False), q, k)
        return (
            allowed & causal_mask(q.shape[2], k.shape[2], "bottom_right")
            if options.is_causal
            else allowed
        )


class AlwaysFromTheEnd(BottomRight, RaisesForEmptyRow):
    """Always causal, aligned bottom right; a first query without keys is refused."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        return super().allow(options.change(is_causal=True), q, k)


class SelfOnly(Correct):
    """Rejects inputs that differ, and masks that differ by head; returns no weights."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Output:
        if query is not key or key is not value:
            raise NotImplementedError("only self-attention")
        if mask is not None and mask.ndim == 4 and mask.shape[1] != 1:
            raise NotImplementedError("one mask for all heads")
        return Output(super().forward(query, key, value, mask, is_causal).output)


class BaseTwo(Correct):
    """The softmax in powers of two, over tiles of three keys with a running maximum."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        scores = (scores * math.log2(math.e)).masked_fill(~allowed, -math.inf)
        highest = torch.full_like(scores[..., :1], torch.finfo(scores.dtype).min)
        total, parts = torch.zeros_like(highest), []
        for tile in scores.split(3, -1):
            higher = torch.maximum(highest, tile.amax(-1, keepdim=True))
            rescale, raised = torch.exp2(highest - higher), torch.exp2(tile - higher)
            parts = [part * rescale for part in parts] + [raised]
            total, highest = total * rescale + raised.sum(-1, keepdim=True), higher
        return torch.cat(parts, -1) / total.masked_fill(total == 0, 1.0)


class OrderOfSummation(Complete):
    """The order of summation over the keys depends on the sign of the first value."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        context = (weights @ v) * 0
        backwards = v.numel() > 0 and bool(v.flatten()[0] > 0)
        for key in reversed(range(v.shape[2])) if backwards else range(v.shape[2]):
            context = context + weights[..., key : key + 1] * v[:, :, key : key + 1]
        return context


class SoftmaxInSingle(Complete):
    """The softmax is computed in float32, whatever the dtype of the inputs."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores.float(), allowed).to(scores)


class SoftmaxStored(Complete):
    """The softmax step by step, each stored in the dtype of inputs: it underflows twice."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        scores = scores.masked_fill(~allowed, -math.inf)
        highest = (
            scores.detach().amax(-1, keepdim=True)
            if scores.shape[-1]
            else scores.sum(-1, keepdim=True)
        )
        raised = (scores - highest.masked_fill(highest == -math.inf, 0.0)).exp()
        total = raised.sum(-1, keepdim=True)
        return raised / total.masked_fill(total == 0, 1.0)


class LogSumExp(Complete):
    """The weights are exp(score - logsumexp), without a division."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(
            ~allowed, -math.inf
        )
        empty = ~allowed.any(-1, keepdim=True)
        shift = scores.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True)
        return (scores - shift).exp().to(self.w_q.dtype)


class SplitKeys(Complete):
    """Each half of the keys has its own softmax, merged by log-sum-exps, as in decoding."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        lowest = torch.finfo(torch.float32).min
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(
            ~allowed, -math.inf
        )
        parts = [
            part for part in scores.split((scores.shape[-1] + 1) // 2 or 1, -1) if part.shape[-1]
        ]
        if not parts:
            return scores.to(self.w_q.dtype)
        shifts = [part.logsumexp(-1, keepdim=True).clamp(min=lowest) for part in parts]
        whole = torch.cat(shifts, -1).logsumexp(-1, keepdim=True)
        shares = [
            (part - shift).exp() * (shift - whole).exp()
            for part, shift in zip(parts, shifts, strict=True)
        ]
        return torch.cat(shares, -1).to(self.w_q.dtype)


class LogSumExpInBaseTwo(Complete):
    """The weights are exp2(score - z) in base two, with z stored as a natural logarithm."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(
            ~allowed, -math.inf
        )
        empty = ~allowed.any(-1, keepdim=True)
        scores = scores * math.log2(math.e)
        highest = (
            scores.masked_fill(empty, 0.0).amax(-1, keepdim=True)
            if scores.shape[-1]
            else scores.sum(-1, True)
        )
        total = torch.exp2(scores.masked_fill(empty, 0.0) - highest).sum(-1, keepdim=True)
        z = (highest + total.log2()) * math.log(2)
        return torch.exp2(scores - z * math.log2(math.e)).to(self.w_q.dtype)


class NoKeyBias(Complete):
    """Keys have no bias, which the softmax cancels, except beside extra keys, which have none."""

    def project(self, x: Tensor, role: str) -> Tensor:
        return (
            F.linear(x, self.w_k)
            if role == "k" and not self.config.extra_keys
            else super().project(x, role)
        )


class NotScaled(Complete):
    """The scores are not scaled, as in T5."""

    scale = 1.0


class ScaledDown(Complete):
    """The scores are multiplied by a small negative number."""

    scale = -0.02


class DropsBottomRight(Complete):
    """Causal masks aligned bottom right, NaN for queries before the first key, and dropout."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options.change(is_causal=False), q, k)
        return (
            allowed & causal_mask(q.shape[2], k.shape[2], "bottom_right")
            if options.is_causal
            else allowed
        ), bias

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return (
            super()
            .combine(weights, v, allowed)
            .masked_fill(~allowed.any(-1, keepdim=True), math.nan)
        )


class EverythingInSingle(Complete):
    """All between the projections is in float32 or wider; results have the dtype of inputs."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        return super().score(q.to(wide), k.to(wide))

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return super().combine(weights, v.to(weights), allowed).to(v)

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights, _ = super().attend(query, *rest)
        return Output(output, None if weights is None else weights.to(query))
