"""Attention that is right but where something coincides: sizes, masks, modes, dtypes; `only` says where it is wrong."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mha.conformance.faults.complete import Complete
from mha.spec import Output


class BatchEqualsHeads(Complete):
    """A mask per item is broadcast over the heads where there are as many of both."""

    only = "B = H"
    source = "https://github.com/lucidrains/vit-pytorch/issues/71"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if mask is not None and mask.ndim == 4 and mask.shape[:2] == (q.shape[1], 1):
            mask = mask.transpose(0, 1)
        return super().allow(mask, is_causal, q, k)


class QueriesEqualKeys(Complete):
    """A mask is transposed where there are as many queries as keys."""

    only = "L = S"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if mask is not None and mask.ndim >= 2 and mask.shape[-1] == mask.shape[-2]:
            mask = mask.mT
        return super().allow(mask, is_causal, q, k)


class MoreQueriesThanKeys(Complete):
    """Queries beyond the number of keys are not masked."""

    only = "L > S, with a mask"
    source = "https://github.com/ml-explore/mlx/pull/2967"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(mask, is_causal, q, k)
        return allowed | (torch.arange(q.shape[2]) >= k.shape[2])[:, None], bias


class CausalForMoreKeys(Complete):
    """The causal diagonal is one further where there are more keys than queries."""

    only = "S > L, causal"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if not is_causal or k.shape[2] <= q.shape[2]:
            return super().allow(mask, is_causal, q, k)
        allowed, bias = super().allow(mask, False, q, k)
        return allowed & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1), bias


class ManyHeads(Complete):
    """Heads beyond the eighth are those before again."""

    only = "H > 8"

    def merge(self, x: Tensor) -> Tensor:
        return super().merge(x[:, torch.arange(x.shape[1]) % 8])


class ThreeHeads(Complete):
    """A number of heads that is no power of two is scaled wrongly."""

    only = "H no power of two"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        heads = self.config.n_heads
        return super().score(q, k) * (1.0 if heads & (heads - 1) == 0 else 0.9)


class OddWidth(Complete):
    """The last column of a head of odd width is left out of the scores."""

    only = "d_k odd"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        even = q.shape[-1] // 2 * 2 or 1
        return super().score(q[..., :even], k[..., :even])


class WidthOne(Complete):
    """With d_k = 1 the scores are not centred on anything but their sign."""

    only = "d_k = 1"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) if self.config.head_dim > 1 else super().score(q, k).sign()


class SingleQuery(Complete):
    """A single query takes the path of decoding, which forgets the mask."""

    only = "L = 1, with a mask"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(None if q.shape[2] == 1 else mask, is_causal, q, k)


class SingleKey(Complete):
    """A single key has the weight 1, masked or not."""

    only = "S = 1, with a mask"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores, allowed | (scores.shape[-1] == 1))


class SingleItem(Complete):
    """A batch of one takes a path that has no causal mask."""

    only = "B = 1, causal"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(mask, is_causal and q.shape[0] > 1, q, k)


class FirstItemForAll(Complete):
    """Where the first item is not padded, no item is taken for padded."""

    only = "the first item unpadded, another padded"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if mask is not None and mask.dtype == torch.bool and mask.ndim == 4 and bool(mask[:1].all()):
            mask = None
        return super().allow(mask, is_causal, q, k)


class ThreeItems(Complete):
    """The third item and later ones have the mask of the second."""

    only = "B > 2, with a mask"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(mask, is_causal, q, k)
        return allowed[torch.arange(len(allowed)).clamp(max=1)], bias


class EvaluationWithoutGradient(Complete):
    """In evaluation and without gradients, the scale is another."""

    only = "eval under no_grad"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        fast = not self.training and not torch.is_grad_enabled()
        return super().score(q, k) * (0.9 if fast else 1.0)


class InferenceMode(Complete):
    """In inference mode, the mask is forgotten."""

    only = "inference_mode, with a mask"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(None if torch.is_inference_mode_enabled() else mask, is_causal, q, k)


class WeightsUnderCausal(Complete):
    """Asked for weights, it forgets that it is causal."""

    only = "weights asked for, causal"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        mask, is_causal, need_weights = rest
        return super().attend(query, key, value, mask, is_causal and not need_weights, need_weights)


class HalfOverflows(Complete):
    """In float16 the scores are scaled after the product, which overflows."""

    only = "float16, large scores"
    source = "https://github.com/PaddlePaddle/Paddle/pull/41933"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return (q * 16 @ k.mT / 16 / math.sqrt(self.config.head_dim)) if q.dtype == torch.half else super().score(q, k)


class HalfAccumulated(Complete):
    """In bfloat16 the context is accumulated key by key in bfloat16."""

    only = "bfloat16, many keys"

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        if v.dtype != torch.bfloat16:
            return super().combine(weights, v, allowed)
        context = torch.zeros_like(weights[..., :1] * v[..., :1, :])
        for key in range(v.shape[2]):
            seen = v[..., key, None, :].masked_fill(~allowed[..., key].any(2)[..., None, None], 0.0)
            context = context + weights[..., key, None] * seen
        return context
