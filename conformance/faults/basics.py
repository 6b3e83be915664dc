"""Attention that is wrong, each class in one way; `gallery` says which clause must catch it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mha.conformance.faults.correct import Correct
from mha.spec import Config, Output, causal_mask


class Unscaled(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2)


class ScaledByModelWidth(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / math.sqrt(self.config.d_model)


class ScaleInSinglePrecision(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / float(torch.tensor(self.config.head_dim).float().sqrt())


class SoftmaxOverQueries(Correct):
    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores.transpose(-1, -2), allowed.transpose(-1, -2)).transpose(-1, -2)


class MaskAfterSoftmax(Correct):
    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.softmax(-1) * allowed


class NoMaximumTakenOff(Correct):
    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        raised = scores.exp() * allowed
        return raised / raised.sum(-1, keepdim=True).clamp(min=1e-30)


class HeadsByViewAlone(Correct):
    def split(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], self.config.n_heads, x.shape[1], self.config.head_dim)


class HeadsReversed(Correct):
    def merge(self, x: Tensor) -> Tensor:
        return super().merge(x.flip(1))


class FirstHeadForAll(Correct):
    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores[:, :1].expand_as(scores), allowed)


class PolarityReversed(Correct):
    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        return super().allow(None if mask is None else ~mask, is_causal, q, k)


class MaskOfFirstItem(Correct):
    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        return super().allow(None if mask is None else mask[:1], is_causal, q, k)


class LastKeyNeverMasked(Correct):
    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        allowed = super().allow(mask, is_causal, q, k).clone()
        if not is_causal:
            allowed[..., -1] = True
        return allowed


class FiniteFill(Correct):
    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.masked_fill(~allowed, -1e9).softmax(-1)


class NanInEmptyRow(Correct):
    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.masked_fill(~allowed, -math.inf).softmax(-1)


class EmptyRowSpoilsItem(Correct):
    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        spoilt = (~allowed.any(-1)).flatten(1).any(1).view(-1, 1, 1, 1)
        return super().weigh(scores, allowed).masked_fill(spoilt, 0.0)


class CausalOffByOne(Correct):
    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        allowed = super().allow(mask, False, q, k)
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(2)
        return allowed & ~later if is_causal else allowed


class CausalFromTheRight(Correct):
    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        allowed = super().allow(mask, False, q, k)
        return allowed & causal_mask(q.shape[2], k.shape[2], "bottom_right") if is_causal else allowed


class CausalForgottenBesideMask(Correct):
    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        return super().allow(mask, is_causal and mask is None, q, k)


class LaterGradientLeaks(Correct):
    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        smooth = scores.softmax(-1)
        return super().weigh(scores, allowed) + (smooth - smooth.detach())


class DependsOnBatchSize(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * (1.01 if q.shape[0] > 1 else 1.0)


class ReadsOtherItems(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k + 1e-6 * k.mean(0, keepdim=True))


class DropsKeyAfterTile(Correct):
    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        whole = scores.shape[-1] // 16 * 16
        if 0 < whole < scores.shape[-1]:
            allowed = allowed & (torch.arange(scores.shape[-1]) < whole)
        return super().weigh(scores, allowed)


class SqueezesBatchOfOne(Correct):
    def forward(self, query: Tensor, *rest: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Output:
        output, weights = super().forward(query, *rest, mask=mask, is_causal=is_causal)
        return Output(output.squeeze(0), weights)


class ReadsMemoryAsDense(Correct):
    def forward(self, query: Tensor, *rest: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Output:
        return super().forward(query.as_strided(query.shape, torch.empty(query.shape).stride()), *rest, mask, is_causal)


class MeanOfValues(Correct):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * 0


class RepeatsItself(Correct):
    last: Output | None = None

    def forward(self, query: Tensor, *rest: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Output:
        if self.last is None or self.last.output.shape != query.shape:
            self.last = super().forward(query, *rest, mask=mask, is_causal=is_causal)
        return self.last


class BatchOfKeysBroadcast(Correct):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Output:
        if key.shape[0] == value.shape[0] == 1:
            key, value = (x.expand(query.shape[0], -1, -1) for x in (key, value))
        return super().forward(query, key, value, mask, is_causal)


class IntegerMaskAsBoolean(Correct):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Output:
        return super().forward(query, key, value, None if mask is None else mask.bool(), is_causal)


class NoValidation(Correct):
    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, 1, bias)
        self.config = Config(d_model, n_heads, bias=bias)


class EmptyUnderCausal(Correct):
    """A row that only the causal mask and the padding together leave empty is NaN."""

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        self.spoilt = torch.zeros((), dtype=torch.bool)
        allowed = super().allow(mask, is_causal, q, k)
        if is_causal and mask is not None:
            self.spoilt = ~allowed.any(-1, keepdim=True) & super().allow(mask, False, q, k).any(-1, keepdim=True)
        return allowed

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores, allowed).masked_fill(self.spoilt, math.nan)


class ForgetsMemory(Correct):
    """Takes key and value that are one tensor for the input of self-attention."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Output:
        if key is value and key.shape == query.shape:
            query = key
        return super().forward(query, key, value, mask, is_causal)


class CausalMaskOfFirstCall(Correct):
    """Keeps the joined mask of the first causal call for later ones of the same shape."""

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        allowed = super().allow(mask, is_causal, q, k)
        if is_causal:
            self.kept = getattr(self, "kept", {})
            allowed = self.kept.setdefault(allowed.shape, allowed)
        return allowed


class HeadMaskIgnoredWithoutQueries(Correct):
    """A mask (B or 1, H, 1, S) is not looked at."""

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        ignored = mask is not None and mask.ndim == 4 and mask.shape[1] > 1 and mask.shape[2] == 1 < q.shape[2]
        return super().allow(None if ignored else mask, is_causal, q, k)


class ScalesQueryInPlace(Correct):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Output:
        return super().forward(query.mul_(1.0), key, value, mask, is_causal)


class RefusesHeadsOfWidthOne(Correct):
    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, bias)
        if d_model == n_heads > 2:
            raise ValueError(f"d_model ({d_model}) must be larger than n_heads ({n_heads})")
