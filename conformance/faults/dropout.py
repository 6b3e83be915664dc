"""Attention whose dropout is wrong; see `gallery`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.complete import Complete
from mha.spec import Output


class DropsInEvaluation(Complete):
    """Dropout is active in evaluation."""

    source = "https://github.com/huggingface/pytorch-image-models/pull/1978"

    def drop(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.config.dropout, True)


class DropsAtZero(Complete):
    """Something is dropped with p = 0."""

    def drop(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.config.dropout or 0.1, self.training)


class NotRescaled(Complete):
    """What is kept is not rescaled by 1/(1-p)."""

    def drop(self, weights: Tensor) -> Tensor:
        return super().drop(weights) * (1 - self.config.dropout if self.training else 1.0)


class NotRescaledForManyKeys(Complete):
    """With many keys, what is kept is not rescaled."""

    def drop(self, weights: Tensor) -> Tensor:
        rescaled = weights.shape[-1] == 1 or not self.training
        return super().drop(weights) * (1.0 if rescaled else 1 - self.config.dropout)


class AnotherProbability(Complete):
    """The probability is off by three in a hundred, and the rescaling is that of the right one."""

    def drop(self, weights: Tensor) -> Tensor:
        if not self.training:
            return weights
        kept = torch.rand_like(weights) >= 0.97 * self.config.dropout
        return weights * kept / (1 - self.config.dropout) if self.config.dropout < 1 else weights * 0


class OneDrawForAllQueries(Complete):
    """All queries share one draw."""

    source = "https://github.com/NVIDIA/TransformerEngine/pull/227"

    def drop(self, weights: Tensor) -> Tensor:
        return weights * super().drop(torch.ones_like(weights[..., :1, :]))


class FixedSeed(Complete):
    """Every call draws from a seed of its own, always the same."""

    source = "https://github.com/Dao-AILab/flash-attention/issues/2088"

    def drop(self, weights: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return super().drop(weights)


class SeedIgnored(Complete):
    """The draw is from a generator of its own, which no seed reaches."""

    source = "https://github.com/keras-team/keras/issues/19688"

    generator = torch.Generator()

    def drop(self, weights: Tensor) -> Tensor:
        if not (self.training and self.config.dropout):
            return weights
        drawn = torch.rand(weights.shape, generator=self.generator).to(weights)
        return weights * (drawn >= self.config.dropout) / (1 - self.config.dropout)


class NanForAll(Complete):
    """With p = 1 the output is NaN."""

    def drop(self, weights: Tensor) -> Tensor:
        if not self.training:
            return weights
        return weights * (torch.rand_like(weights) >= self.config.dropout) / (1 - self.config.dropout)


class WeightsAfterDropout(Complete):
    """The weights returned are those after dropout."""

    source = "https://github.com/pytorch/pytorch/issues/42929"

    def drop(self, weights: Tensor) -> Tensor:
        self.dropped = super().drop(weights)
        return self.dropped

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights = super().attend(query, *rest)
        return Output(output, None if weights is None else self.dropped)


class MaskDropped(Complete):
    """Keys are dropped before the softmax, which shares their weight out among the others."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        kept = torch.rand_like(scores) >= self.config.dropout if self.training else allowed
        return super().weigh(scores, allowed & kept)

    def drop(self, weights: Tensor) -> Tensor:
        return weights


class OneDrawForAllKeys(Complete):
    """All keys share one draw."""

    def drop(self, weights: Tensor) -> Tensor:
        return weights * super().drop(torch.ones_like(weights[..., :1]))


class DropsContexts(Complete):
    """The contexts are dropped instead of the weights."""

    source = "https://github.com/nikhilbarhate99/min-decision-transformer/issues/2"

    def drop(self, weights: Tensor) -> Tensor:
        return weights

    def merge(self, x: Tensor) -> Tensor:
        return super().drop(super().merge(x))


class SameDropAtEachCall(Complete):
    """Each call draws from the seed of the run anew."""

    def drop(self, weights: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch.initial_seed())
            return super().drop(weights)


class OutputDropped(Complete):
    """Dropout of the output, and none of the weights."""

    source = "https://github.com/lucidrains/perceiver-pytorch/issues/57"

    def drop(self, weights: Tensor) -> Tensor:
        return weights

    def project(self, x: Tensor, role: str) -> Tensor:
        projected = super().project(x, role)
        return self.drop_output(projected) if role == "o" else projected

    def drop_output(self, output: Tensor) -> Tensor:
        return torch.nn.functional.dropout(output, self.config.dropout, self.training)


class OutputNotRescaled(OutputDropped):
    """What is kept of the output is not rescaled."""

    def drop_output(self, output: Tensor) -> Tensor:
        return output * torch.ones_like(output).bernoulli_(1 - self.config.dropout) if self.training else output


class OutputDroppedMore(OutputDropped):
    """Dropped with a probability that is 0.014 too high, and rescaled for the right one."""

    def drop_output(self, output: Tensor) -> Tensor:
        p = self.config.dropout
        if not self.training or p in (0, 1):
            return super().drop_output(output)
        return output * torch.ones_like(output).bernoulli_(0.986 - p) / (1 - p)
