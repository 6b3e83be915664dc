"""Attention that is inaccurate, or wrong in an operation that only some numbers show; see `gallery`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mha.conformance.faults.complete import Complete
from mha.spec import Output


class SummedOneByOne(Complete):
    """The denominator is accumulated in the dtype of the inputs, key by key."""

    only = "half precision, long rows"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        weights = super().weigh(scores, allowed)
        raised = (
            (scores - scores.masked_fill(~allowed, -math.inf).amax(-1, keepdim=True)).exp().masked_fill(~allowed, 0)
        )
        total = torch.zeros_like(raised[..., 0])
        for key in range(raised.shape[-1]):
            total = total + raised[..., key]
        return torch.where(allowed, raised / total.unsqueeze(-1), weights)


class ScoresInHalf(Complete):
    """The scores are in half precision, inside a float32 path."""

    source = "https://github.com/huggingface/transformers/pull/33317"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores.half().to(scores), allowed)


class SoftmaxInBfloat16(Complete):
    """The softmax is in bfloat16, inside a float32 path."""

    source = "https://github.com/apple/axlearn/pull/18"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores.bfloat16(), allowed).to(scores)


class FillThatDoesNotFit(Complete):
    """The fill value is no float16 number."""

    only = "float16, with a mask"
    source = "https://github.com/facebookresearch/fairseq/issues/3575"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if bool(allowed.all()):
            return super().weigh(scores, allowed)
        empty = ~allowed.any(-1, keepdim=True)
        return scores.masked_fill(~allowed, -1e9).softmax(-1).masked_fill(empty, 0.0)


class FillThatRunsOver(Complete):
    """The fill is so low that nothing is left of the scores: an empty row gets the mean."""

    only = "an empty row"
    source = "https://github.com/keras-team/keras/pull/21149"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return (scores + torch.zeros_like(scores).masked_fill(~allowed, torch.finfo(scores.dtype).min)).softmax(-1)

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return weights @ v


class FirstThousandKeys(Complete):
    """An index of ten bits."""

    only = "S > 1024"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores, allowed & (torch.arange(scores.shape[-1]) < 1024))


class ValuesNormalised(Complete):
    """Values are divided by their largest before the product, plus a millionth against division by zero."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        largest = v.abs().amax((-2, -1), keepdim=True)
        return super().combine(weights, v / (largest + 1e-6), allowed) * largest


class ScoresClamped(Complete):
    """The scores are clamped to 5 either way."""

    only = "scores beyond 5"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k).clamp(-5.0, 5.0)


class WeightsTooLarge(Complete):
    """The weights are too large by one in a hundred."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores, allowed) * 1.01


class AlmostOne(Complete):
    """Weights too large by so little that only exact answers show it."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores, allowed) * (1 + 2 * torch.finfo(scores.dtype).eps)


class FirstHeadLouder(Complete):
    """The first head counts one in a hundred more than the others."""

    def merge(self, x: Tensor) -> Tensor:
        return super().merge(torch.cat([x[:, :1] * 1.01, x[:, 1:]], 1))


class OneHeadNotProjected(Complete):
    """With a single head there is no output projection."""

    only = "H = 1"
    source = "https://github.com/lucidrains/vit-pytorch/issues/335"

    def project(self, x: Tensor, role: str) -> Tensor:
        return x.clone() if role == "o" and self.config.n_heads == 1 else super().project(x, role)


class OutputClipped(Complete):
    """The output is clipped to 1 either way."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights = super().attend(query, *rest)
        return Output(output.clamp(-1.0, 1.0), weights)


class LaterKeysFavoured(Complete):
    """A key weighs a little more the later it stands."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) + torch.arange(k.shape[2]).to(q) / 100


class ValuesClipped(Complete):
    """The values are clipped to 2 either way."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return super().combine(weights, v.clamp(-2.0, 2.0), allowed)


class Sink(Complete):
    """One is added to the denominator."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        highest = scores.amax(-1, keepdim=True).clamp(min=0.0)
        raised = (scores - highest).exp().masked_fill(~allowed, 0.0)
        return raised / (raised.sum(-1, keepdim=True) + (-highest).exp())


class ValueByKeyProjection(Complete):
    """The value is projected by W_k."""

    def project(self, x: Tensor, role: str) -> Tensor:
        return super().project(x, "k" if role == "v" else role)


class SixtyFourColumns(Complete):
    """A head is as wide as the tile."""

    only = "d_k > 64"
    source = "https://github.com/ROCm/aiter/pull/2273"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q[..., :64] @ k[..., :64].mT / math.sqrt(self.config.head_dim)
