"""Attention that reads or joins masks wrongly; see `gallery`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mha.conformance.faults.complete import Complete
from mha.spec import Output, causal_mask


class MaskIgnored(Complete):
    """The mask is not looked at."""

    source = "https://github.com/NVIDIA/TransformerEngine/issues/1524"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(None, is_causal, q, k)


class MaskOfFirstHead(Complete):
    """The first head's mask is used for all."""

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(mask[:, :1] if mask is not None and mask.ndim == 4 else mask, is_causal, q, k)


class MaskOfFirstQuery(Complete):
    """The first query's mask is used for all."""

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(mask[..., :1, :] if mask is not None and mask.ndim >= 2 else mask, is_causal, q, k)


class MaskOnQueries(Complete):
    """A mask of keys is added to whole rows, where it cancels in the softmax."""

    only = "L = S, with a mask of keys"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if mask is not None and mask.dtype == torch.bool and mask.shape[-2:] == (1, q.shape[2]):
            allowed, bias = super().allow(None, is_causal, q, k)
            return allowed, bias - 1e4 * ~mask.mT
        return super().allow(mask, is_causal, q, k)


class FirstKeyNeverMasked(Complete):
    """The first key cannot be masked."""

    source = "https://github.com/google/trax/issues/820"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores, allowed | (torch.arange(scores.shape[-1]) == 0))


class CausalExcludesItself(Complete):
    """A query may not attend to the key at its own place, but for the first."""

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if not is_causal:
            return super().allow(mask, is_causal, q, k)
        allowed, bias = super().allow(mask, False, q, k)
        before = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(-1)
        before[:1, :1] = True
        return allowed & before, bias


class CausalFromTheLeft(Complete):
    """The causal diagonal is aligned top-left, and bottom-right is declared."""

    only = "L != S, causal"
    source = "https://github.com/NVIDIA/cutlass/issues/2336"


class PaddingForgottenUnderCausal(Complete):
    """With the causal flag, the mask is forgotten."""

    only = "causal, with a mask"
    source = "https://github.com/AI-Hypercomputer/maxtext/issues/878"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(None if is_causal else mask, is_causal, q, k)


class JoinedByEither(Complete):
    """Mask and causal flag are joined by `or`: what either allows may attend."""

    only = "causal, with a mask"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(mask, False, q, k)
        if is_causal:
            triangle = causal_mask(q.shape[2], k.shape[2], "top_left")
            allowed = triangle.expand_as(allowed) if mask is None else allowed | triangle
        return allowed, bias


class IntegerMaskAdded(Complete):
    """A mask of integers, 1 = may attend, is added to the scores."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any) -> Output:
        return super().attend(
            query, key, value, mask if mask is None or mask.is_floating_point() else mask + 0.0, *rest
        )


class FillAboveLowScores(Complete):
    """Masked scores are -1e5, which is more than the lowest scores of keys that are allowed."""

    only = "scores below -1e5"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        filled = scores.masked_fill(~allowed, -1e5 if scores.dtype != torch.half else -math.inf)
        return filled.softmax(-1).masked_fill(~allowed.any(-1, keepdim=True), 0.0)


class FloatMaskScaled(Complete):
    """A float mask is added before the scores are scaled."""

    only = "a float mask, d_k > 1"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(mask, is_causal, q, k)
        return allowed, bias / math.sqrt(self.config.head_dim)


class EmptyRowSpoilsBatch(Complete):
    """A row with no allowed key makes the last row of the batch NaN."""

    only = "an empty row"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        weights = super().weigh(scores, allowed)
        spoilt = torch.zeros_like(allowed)
        if weights.numel():
            spoilt[-1, -1, -1] = (~allowed.any(-1)).any()
        return weights.masked_fill(spoilt, math.nan)


class EmptyRowsHaveGradients(Complete):
    """An empty row's context is zero, and its gradient is not."""

    only = "an empty row, with gradients"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        empty = ~allowed.any(-1, keepdim=True)
        smooth = scores.softmax(-1) * empty
        return super().weigh(scores, allowed) + (smooth - smooth.detach())


class FloatMaskAsBoolean(Complete):
    """A float mask is read as a boolean one."""

    only = "a float mask"
    source = "https://github.com/huggingface/transformers/pull/38094"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(None if mask is None else mask.bool(), is_causal, q, k)


class FiniteMaskForgotten(Complete):
    """A float mask only forbids: what it adds elsewhere is lost."""

    only = "a float mask with numbers"
    source = "https://github.com/pytorch/pytorch/issues/107084"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(mask, is_causal, q, k)
        return allowed, bias * 0


class LowestNumberAsInfinity(Complete):
    """The dtype's lowest number in a mask is read as -infinity."""

    only = "the lowest number in a float mask"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any) -> Output:
        if mask is not None and mask.is_floating_point():
            mask = mask.masked_fill(mask == torch.finfo(mask.dtype).min, -math.inf)
        return super().attend(query, key, value, mask, *rest)


class FlatMaskForgotten(Complete):
    """Only a mask of four dimensions is looked at."""

    only = "a mask of fewer dimensions"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(mask if mask is not None and mask.ndim == 4 else None, is_causal, q, k)


class MaskCropped(Complete):
    """A mask that is too large is cut to fit."""

    only = "a mask that is too large"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any) -> Output:
        if mask is not None and mask.ndim >= 2:
            mask = mask[..., : query.shape[1], : key.shape[1]]
        return super().attend(query, key, value, mask, *rest)


class ShortFill(Complete):
    """Masked scores are lowered by 20 instead of taken away."""

    source = "https://github.com/huggingface/transformers/issues/14859"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return (scores - 20.0 * ~allowed).softmax(-1).masked_fill(~allowed.any(-1, keepdim=True), 0.0)


class OtherPrecisionAsBoolean(Complete):
    """A mask of numbers in another dtype than the query's is read as a boolean one."""

    only = "a mask of numbers in another dtype than the query"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any) -> Output:
        other = mask is not None and mask.is_floating_point() and mask.dtype != query.dtype
        return super().attend(query, key, value, mask.bool() if mask is not None and other else mask, *rest)
