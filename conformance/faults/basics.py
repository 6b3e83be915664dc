"""Attention that is wrong, each class in one way; `gallery` says which clause must catch it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mha.conformance.faults.correct import Correct
from mha.spec import causal_mask


class Unscaled(Correct):
    """The scores are not divided by sqrt(d_k)."""

    source = "https://github.com/mlc-ai/mlc-llm/pull/3426"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2)


class ScaledByModelWidth(Correct):
    """Divided by sqrt(d_model) instead of sqrt(d_k)."""

    source = "https://github.com/lucidrains/vit-pytorch/issues/65"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / math.sqrt(self.config.d_model)


class ScaleInSinglePrecision(Correct):
    """sqrt(d_k) is rounded to float32."""

    only = "float64"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / float(torch.tensor(self.config.head_dim).float().sqrt())


class SoftmaxOverQueries(Correct):
    """The softmax runs over the queries."""

    source = "https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/146"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores.transpose(-1, -2), allowed.transpose(-1, -2)).transpose(-1, -2)


class MaskAfterSoftmax(Correct):
    """Masked weights are set to zero after the softmax, and the others not made to sum to 1 again."""

    source = "https://github.com/huggingface/pytorch-image-models/pull/2236"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.softmax(-1) * allowed


class NoMaximumTakenOff(Correct):
    """The maximum is not taken off before the exponential, which overflows."""

    only = "large scores"
    source = "https://github.com/NVIDIA/FasterTransformer/issues/43"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        raised = scores.exp() * allowed
        return raised / raised.sum(-1, keepdim=True).clamp(min=1e-30)


class HeadsByViewAlone(Correct):
    """`view` to (B, H, L, d_k) without the transpose."""

    source = "https://github.com/reczoo/FuxiCTR/issues/30"

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], self.config.n_heads, x.shape[1], self.config.head_dim)


class HeadsReversed(Correct):
    """The heads are joined in the reverse order."""

    def merge(self, x: Tensor) -> Tensor:
        return super().merge(x.flip(1))


class FirstHeadForAll(Correct):
    """The first head's weights are used for all."""

    source = "https://github.com/BobMcDear/attorch/issues/14"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores[:, :1].expand_as(scores), allowed)


class PolarityReversed(Correct):
    """True is read as masked."""

    source = "https://github.com/lucidrains/halonet-pytorch/pull/6"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        return super().allow(None if mask is None else ~mask, is_causal, q, k)


class MaskOfFirstItem(Correct):
    """The first item's mask is used for the whole batch."""

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        return super().allow(None if mask is None else mask[:1], is_causal, q, k)


class LastKeyNeverMasked(Correct):
    """The last key cannot be masked."""

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        allowed = super().allow(mask, is_causal, q, k).clone()
        if not is_causal:
            allowed[..., -1] = True
        return allowed


class FiniteFill(Correct):
    """Masked scores are filled with a finite number, so that an empty row attends to all keys."""

    only = "an empty row"
    source = "https://github.com/NVIDIA/apex/issues/1390"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.masked_fill(~allowed, -1e9).softmax(-1)


class NanInEmptyRow(Correct):
    """An empty row is NaN."""

    only = "an empty row"
    source = "https://github.com/pytorch/pytorch/issues/40932"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.masked_fill(~allowed, -math.inf).softmax(-1)


class EmptyRowSpoilsItem(Correct):
    """An empty row makes all weights of its item zero."""

    only = "an empty row"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        spoilt = (~allowed.any(-1)).flatten(1).any(1).view(-1, 1, 1, 1)
        return super().weigh(scores, allowed).masked_fill(spoilt, 0.0)


class CausalOffByOne(Correct):
    """A query may attend to the key after it."""

    source = "https://github.com/octo-models/octo/issues/75"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        allowed = super().allow(mask, False, q, k)
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(2)
        return allowed & ~later if is_causal else allowed


class CausalFromTheRight(Correct):
    """The causal diagonal is aligned bottom-right, and top-left is declared."""

    only = "L != S, causal"
    source = "https://github.com/ml-explore/mlx/issues/2835"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        allowed = super().allow(mask, False, q, k)
        return allowed & causal_mask(q.shape[2], k.shape[2], "bottom_right") if is_causal else allowed


class CausalForgottenBesideMask(Correct):
    """With a mask, the causal flag is forgotten."""

    only = "causal, with a mask"
    source = "https://github.com/huggingface/transformers/pull/41966"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        return super().allow(mask, is_causal and mask is None, q, k)


class LaterGradientLeaks(Correct):
    """Later positions get a gradient, though they have no influence."""

    source = "https://github.com/Dao-AILab/flash-attention/issues/1915"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        smooth = scores.softmax(-1)
        return super().weigh(scores, allowed) + (smooth - smooth.detach())


class DependsOnBatchSize(Correct):
    """The result depends on the size of the batch."""

    only = "B > 1"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * (1.01 if q.shape[0] > 1 else 1.0)


class ReadsOtherItems(Correct):
    """An item's result depends on the others."""

    source = "https://github.com/line/lighthouse/pull/77"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k + 1e-6 * k.mean(0, keepdim=True))
