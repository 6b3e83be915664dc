"""Faults that DRP must catch: what dropout drops, how it rescales, and from which draws."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.base import CLAIMS, Complete
from mha.conformance.faults.families import drops_in_evaluation, one_draw
from mha.conformance.faults.fault import fault
from mha.spec import Output


@fault("DRP-1", source="https://github.com/huggingface/pytorch-image-models/pull/1978")
class DropsInEvaluation(drops_in_evaluation(when=lambda module: True)):
    """Dropout is active in evaluation."""


@fault("DRP-1", caught_by="evaluation_and_zero_drop_nothing")
class DropsAtZero(Complete):
    """Something is dropped with p = 0."""

    def drop(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.config.dropout or 0.1, self.training)


@fault("DRP-2")
class NotRescaled(Complete):
    """The kept weights are not rescaled by 1 / (1 - p)."""

    def drop(self, weights: Tensor) -> Tensor:
        return super().drop(weights) * (1 - self.config.dropout if self.training else 1.0)


@fault("DRP-2")
class MaskDropped(Complete):
    """Keys are dropped before the softmax, which shares their weight out among the others."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        kept = torch.rand_like(scores) >= self.config.dropout if self.training else allowed
        return super().weigh(scores, allowed & kept)

    def drop(self, weights: Tensor) -> Tensor:
        return weights


@fault("DRP-2", caught_by="the_share_that_is_dropped_is_p", trigger="d_k <= 32")
class NarrowQueriesDropAlike(Complete):
    """In heads of up to 32 columns, all queries drop the same keys."""

    def drop(self, weights: Tensor) -> Tensor:
        if self.config.head_dim > 32:
            return super().drop(weights)
        return weights * super().drop(torch.ones_like(weights[:, :, :1]))


@fault("DRP-2", caught_by="each_weight_is_dropped_alone_or_rescaled")
class ValueBiasKept(Complete):
    """The bias of the values is added to the contexts, where rows sum to 1 only without dropout."""

    def project(self, x: Tensor, role: str) -> Tensor:
        if role == "v":
            return F.linear(x, self.w_v)
        return super().project(x, role)

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        context, bias = super().combine(weights, v, allowed), getattr(self, "b_v", None)
        if bias is None:
            return context
        rows = allowed.any(-1, keepdim=True)
        return context + self.repeat(self.split(bias[None, None])) * rows


@fault("DRP-2", caught_by="each_weight_is_dropped_alone_or_rescaled")
class UnscaledWhereItDrops(Complete):
    """The scores are not scaled in the path that drops weights, which a fused kernel is not used
    for.
    """

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        drops = self.training and self.config.dropout > 0
        if drops:
            scores = scores * math.sqrt(self.config.head_dim)
        return super().weigh(scores, allowed)


@fault("DRP-2", caught_by="the_share_that_is_dropped_is_p")
class AnotherProbability(Complete):
    """The probability is too low by 3%, and the rescaling is that of the nominal one."""

    def drop(self, weights: Tensor) -> Tensor:
        if not self.training:
            return weights
        kept = torch.rand_like(weights) >= 0.97 * self.config.dropout
        if self.config.dropout < 1:
            return weights * kept / (1 - self.config.dropout)
        return weights * 0


@fault(
    "DRP-2",
    caught_by="each_weight_is_dropped_alone_or_rescaled",
    source="https://github.com/NVIDIA/TransformerEngine/pull/227",
)
class OneDrawForAllQueries(one_draw(lambda weights: weights[..., :1, :])):
    """All queries share one draw."""


@fault("DRP-2", caught_by="each_weight_is_dropped_alone_or_rescaled")
class OneDrawForAllKeys(one_draw(lambda weights: weights[..., :1])):
    """All keys share one draw."""


@fault("DRP-2", caught_by="each_weight_is_dropped_alone_or_rescaled")
class NotRescaledForManyKeys(Complete):
    """With several keys, the kept weights are not rescaled."""

    def drop(self, weights: Tensor) -> Tensor:
        rescaled = weights.shape[-1] == 1 or not self.training
        return super().drop(weights) * (1.0 if rescaled else 1 - self.config.dropout)


@fault(
    "DRP-2",
    caught_by="each_weight_is_dropped_alone_or_rescaled",
    source="https://github.com/nikhilbarhate99/min-decision-transformer/issues/2",
)
class DropsContexts(Complete):
    """The contexts are dropped instead of the weights."""

    def drop(self, weights: Tensor) -> Tensor:
        return weights

    def merge(self, x: Tensor) -> Tensor:
        return super().drop(super().merge(x))


class OutputDropped(Complete):
    """Drops the output instead of the weights, as a claim `dropout="output"` says.

    Seen in https://github.com/lucidrains/perceiver-pytorch/issues/57.
    """

    def drop(self, weights: Tensor) -> Tensor:
        return weights

    def project(self, x: Tensor, role: str) -> Tensor:
        projected = super().project(x, role)
        if role == "o":
            return self.drop_output(projected)
        return projected

    def drop_output(self, output: Tensor) -> Tensor:
        return F.dropout(output, self.config.dropout_of_output, self.training)


@fault(
    "DRP-2",
    caught_by="each_output_is_dropped_alone_or_rescaled",
    claims=replace(CLAIMS, dropout="output"),
)
class OutputNotRescaled(OutputDropped):
    """The kept outputs are not rescaled."""

    def drop_output(self, output: Tensor) -> Tensor:
        if self.training:
            return output * torch.ones_like(output).bernoulli_(1 - self.config.dropout)
        return output


@fault(
    "DRP-2",
    caught_by="the_share_of_outputs_that_is_dropped_is_p",
    claims=replace(CLAIMS, dropout="output"),
)
class OutputDroppedMore(OutputDropped):
    """The output is dropped with a probability that is 0.014 too high, and rescaled for the nominal
    one.
    """

    def drop_output(self, output: Tensor) -> Tensor:
        p = self.config.dropout
        if not self.training or p in (0, 1):
            return super().drop_output(output)
        return output * torch.ones_like(output).bernoulli_(0.986 - p) / (1 - p)


class WeightsAndOutputDropped(OutputDropped):
    """Drops the weights, and then the output, as `dropout="both"` claims, usual in GPT blocks."""

    def drop(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.config.dropout, self.training)


DROPS_BOTH = replace(CLAIMS, dropout="both")


@fault("DRP-2", caught_by="each_weight_and_each_output_is_dropped_alone", claims=DROPS_BOTH)
class WeightsForgotten(WeightsAndOutputDropped):
    """Only the output is dropped, though the weights should be dropped too."""

    def drop(self, weights: Tensor) -> Tensor:
        return weights


@fault("DRP-2", caught_by="each_weight_and_each_output_is_dropped_alone", claims=DROPS_BOTH)
class OutputRowsDropped(WeightsAndOutputDropped):
    """Whole rows of the output are dropped instead of single elements."""

    def drop_output(self, output: Tensor) -> Tensor:
        return output * F.dropout(
            torch.ones_like(output[..., :1]), self.config.dropout, self.training
        )


@fault(
    "DRP-2",
    caught_by="each_probability_is_of_its_own_place",
    claims=replace(CLAIMS, dropout="each"),
    trigger="two different probabilities",
    source="https://github.com/facebookresearch/vjepa2/pull/160",
)
class OutputProbabilityForWeights(WeightsAndOutputDropped):
    """The weights are dropped with the probability of the output."""

    def drop(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.config.dropout_of_output, self.training)


@fault(
    "DRP-5",
    caught_by="heads_and_items_drop_independently",
    trigger="dropout, several heads or items",
)
class OneDrawForAll(one_draw(lambda weights: weights[:1, :1])):
    """All heads and items share one draw."""


@fault(
    "DRP-3",
    caught_by="the_seed_decides_what_is_dropped",
    source="https://github.com/Dao-AILab/flash-attention/issues/2088",
)
class FixedSeed(Complete):
    """Every call draws from the same fixed seed."""

    def drop(self, weights: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return super().drop(weights)


@fault(
    "DRP-3",
    caught_by="the_seed_decides_what_is_dropped",
    source="https://github.com/keras-team/keras/issues/19688",
)
class SeedIgnored(Complete):
    """The draw is from a private generator, which no seed reaches."""

    generator = torch.Generator()

    def drop(self, weights: Tensor) -> Tensor:
        if not (self.training and self.config.dropout):
            return weights
        drawn = torch.rand(weights.shape, generator=self.generator).to(weights)
        return weights * (drawn >= self.config.dropout) / (1 - self.config.dropout)


@fault("DRP-3", caught_by="dropping_everything_is_not_nan")
class NanForAll(Complete):
    """With p = 1 the output is NaN."""

    def drop(self, weights: Tensor) -> Tensor:
        if not self.training:
            return weights
        return (
            weights * (torch.rand_like(weights) >= self.config.dropout) / (1 - self.config.dropout)
        )


@fault("DRP-3", caught_by="the_seed_decides_what_is_dropped")
class SameDropAtEachCall(Complete):
    """Each call starts again from the initial seed, so that all calls drop the same."""

    def drop(self, weights: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch.initial_seed())
            return super().drop(weights)


class _Drop(torch.autograd.Function):
    """Dropout whose backward pass does not handle p = 1."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, p: float) -> Tensor:
        kept = torch.rand_like(weights) >= p
        ctx.save_for_backward(kept)
        ctx.p = p
        if p == 1:
            return weights * kept
        return weights * kept / (1 - p)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        return gradient * kept / torch.tensor(1 - ctx.p), None


@fault("DRP-3", caught_by="dropping_everything_is_not_nan", trigger="p = 1, backwards")
class NoGradientOfNothing(Complete):
    """If everything is dropped, the gradient is 0 times infinity."""

    def drop(self, weights: Tensor) -> Tensor:
        p = self.config.dropout
        if self.training and p:
            return _Drop.apply(weights, p)
        return weights


@fault("DRP-5", caught_by="grouped_heads_drop_independently", trigger="grouped heads and dropout")
class GroupsDroppedAlike(Complete):
    """All heads of a group share one draw of dropout."""

    def drop(self, weights: Tensor) -> Tensor:
        kept = super().drop(torch.ones_like(weights[:, : self.config.kv_heads]))
        return weights * self.repeat(kept)


@fault("DRP-4", source="https://github.com/pytorch/pytorch/issues/42929")
class WeightsAfterDropout(Complete):
    """The returned weights are those after dropout."""

    def drop(self, weights: Tensor) -> Tensor:
        self.dropped = super().drop(weights)
        return self.dropped

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights, _ = super().attend(query, *rest)
        return Output(output, None if weights is None else self.dropped)


@fault(
    "DRP-2",
    caught_by="each_weight_of_a_window_is_dropped_alone",
    trigger="a window, in training",
)
class NotRescaledInWindow(Complete):
    """With a window, the kept weights are not rescaled by 1 / (1 - p)."""

    def drop(self, weights: Tensor) -> Tensor:
        dropped = super().drop(weights)
        if self.options.window is None or not self.training:
            return dropped
        return dropped * (1 - self.config.dropout)
