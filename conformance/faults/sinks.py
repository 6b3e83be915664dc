"""Faults that SNK must catch: sinks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mha.conformance.faults.base import Complete
from mha.conformance.faults.families import hooked, sinks_changed
from mha.conformance.faults.fault import fault

TAKES_PART = "a_sink_takes_part_in_the_denominator_only"


@fault(
    "SNK-1", caught_by=TAKES_PART, source="https://github.com/NVIDIA/TransformerEngine/issues/2541"
)
@fault("EFF-1", caught_by="a_sink_has_an_effect")
class SinksIgnored(Complete):
    """Sinks have no effect."""

    def sinks(self, scores: Tensor) -> Tensor | None:
        return None


@fault("SNK-1", caught_by="a_sink_goes_with_other_options", trigger="grouped heads")
class SinkOfTheKeyHead(Complete):
    """The query heads that share a key have the sink of the first of them."""

    def sinks(self, scores: Tensor) -> Tensor | None:
        given, shared = super().sinks(scores), self.config.n_heads // self.config.kv_heads
        if given is None:
            return None
        return given[::shared].repeat_interleave(shared)


@fault("SNK-1", caught_by=TAKES_PART, trigger="sinks above the scores")
class MaximumWithoutTheSink(sinks_changed(lambda given, scores: given.clamp(max=4.0))):
    """The maximum that is subtracted is that of the scores, so that a high sink is cut off."""


@fault("SNK-1", caught_by=TAKES_PART, trigger="a query without a key")
class KeylessRowsSeeAll(Complete):
    """A query without a key attends to all keys, beside the sink."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        keyless = ~allowed.any(-1, keepdim=True) & (self.options.sinks is not None)
        return super().weigh(scores, allowed | keyless)


@fault("SNK-1", caught_by=TAKES_PART, trigger="sinks")
class SinkScaled(Complete):
    """The sink is multiplied by the scale of the scores."""

    def sinks(self, scores: Tensor) -> Tensor | None:
        given = super().sinks(scores)
        if given is None:
            return None
        return given / math.sqrt(self.config.head_dim)


@fault("SNK-1", caught_by=TAKES_PART, trigger="S > tile, with sinks")
class SinkInEveryTile(
    sinks_changed(lambda given, scores: given + math.log(max(1, -(-scores.shape[-1] // 16))))
):
    """Each tile of 16 keys adds the sink once more."""


@fault("SNK-1", caught_by="a_sink_of_minus_infinity_is_none", trigger="sinks of -infinity")
class InfiniteSinkIsZero(
    sinks_changed(lambda given, scores: given.masked_fill(given == -math.inf, 0.0))
):
    """A sink of -infinity is read as 0."""


@fault(
    "SNK-2",
    caught_by="a_sink_has_its_gradient",
    script_shows=False,
    source="https://github.com/Dao-AILab/flash-attention/issues/1973",
)
class SinkWithoutGradient(sinks_changed(lambda given, scores: given.detach())):
    """The gradient of the sinks is zero."""


@fault("SNK-2", caught_by="a_sink_has_its_gradient", script_shows=False, trigger="sinks, backwards")
class SinkGradientOfOneItem(Complete):
    """The gradient of the sinks is the mean over the items, and not their sum."""

    def sinks(self, scores: Tensor) -> Tensor | None:
        given, items = super().sinks(scores), max(1, scores.shape[0])
        if given is None:
            return None
        return hooked(given * 1.0, lambda gradient: gradient / items)


@fault("SNK-2", caught_by="gradients_have_the_sink", trigger="sinks, backwards")
class NoSinkBackwards(Complete):
    """The gradients of the scores are those of weights whose sum is 1."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        weights = super().weigh(scores, allowed)
        if self.options.sinks is None:
            return weights
        share = weights.sum(-1, keepdim=True).detach()
        plain = torch.where(
            share > 0, weights / weights.sum(-1, keepdim=True).clamp(min=1e-30), 0.0
        )
        return plain * share


@fault(
    "SNK-2",
    caught_by="the_gradient_of_a_sink_goes_with_other_options",
    script_shows=False,
    trigger="sinks beside grouped heads, backwards",
)
class SinkGradientOfTheLastOfAGroup(Complete):
    """Of the query heads that share a key, the sink of the last one only has a gradient."""

    def sinks(self, scores: Tensor) -> Tensor | None:
        given, shared = super().sinks(scores), self.config.n_heads // self.config.kv_heads
        if given is None:
            return None
        is_last = torch.arange(len(given), device=given.device) % shared == shared - 1
        return torch.where(is_last, given, given.detach())
