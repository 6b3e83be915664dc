"""Faults that ALB must catch: a bias that grows with the distance of a key."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.faults.base import CLAIMS, Complete
from mha.conformance.faults.families import hooked
from mha.conformance.faults.fault import fault
from mha.conformance.harness.known_bad.options import (
    from_one,
    geometric,
    of_first_item,
    with_slopes,
)
from mha.spec import Alibi, Options, Scores

Allowed = tuple[Tensor, Tensor]
EQUAL = "alibi_is_the_float_mask_of_its_slopes"
BUILT_IN = replace(CLAIMS, scores=Scores(alibi=Alibi("signed", built_in=True)))
USUAL = "built_in_slopes_are_the_usual_ones"
BOTTOM_RIGHT = replace(CLAIMS, causal="bottom_right", scores=Scores(alibi=Alibi("symmetric")))


@fault("ALB-1", caught_by=EQUAL)
@fault("EFF-1", caught_by="slopes_have_an_effect")
class SlopesIgnored(Complete):
    """Slopes have no effect."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        return super().allow(options.change(alibi=None), q, k)


@fault("ALB-1", caught_by=EQUAL, source="https://github.com/meta-pytorch/attention-gym/pull/86")
class SlopesTurnedRound(Complete):
    """The sign of the bias is turned round."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        return super().allow(with_slopes(options, torch.neg), q, k)


@fault("ALB-1", caught_by="alibi_goes_with_other_options", trigger="grouped heads")
class SlopesOfTheKeyHeads(Complete):
    """The query heads that share a key have the slope of the first of them."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        shared = self.config.n_heads // self.config.kv_heads
        first = torch.arange(self.config.n_heads) // shared * shared
        return super().allow(with_slopes(options, lambda slopes: slopes[..., first]), q, k)


@fault("ALB-1", claims=BOTTOM_RIGHT, caught_by=EQUAL, trigger="L != S")
class DistancesFromTheLeft(Complete):
    """Distances are counted top-left, although bottom-right is declared."""


@fault("ALB-1", caught_by=EQUAL, trigger="S > tile")
class DistancesWithinTiles(Complete):
    """Distances start again at each tile of 16 keys."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        allowed, bias = super().allow(options, q, k)
        if options.alibi is None:
            return allowed, bias
        slopes = torch.tensor(options.alibi).to(q)[..., None, None]
        starts = torch.arange(k.shape[2], device=q.device) // 16 * 16
        return allowed, bias - slopes * starts


@fault("ALB-1", caught_by="gradients_have_the_slopes", trigger="slopes, backwards")
class SlopesBackwards(Complete):
    """With slopes, the gradients of the scores are halved."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        factor = 1.0 if self.options.alibi is None else 0.5
        return hooked(super().score(q, k), lambda gradient: gradient * factor)


@fault("ALB-1", caught_by="each_item_has_its_slopes", trigger="slopes of each item")
class SlopesOfTheFirstItem(Complete):
    """The slopes of the first item are those of every item."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        return super().allow(with_slopes(options, of_first_item), q, k)


@fault(
    "ALB-2",
    claims=BUILT_IN,
    caught_by=USUAL,
    trigger="H is no power of two",
    source="https://github.com/ml-explore/mlx/pull/3071",
)
class SlopesOfAPowerOfTwo(Complete):
    """Built-in slopes are 2^(-8j/H), whatever H is."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        return super().allow(with_slopes(options, geometric), q, k)


@fault(
    "ALB-2",
    claims=BUILT_IN,
    caught_by=USUAL,
    source="https://github.com/paiml/aprender/pull/2143",
)
class SlopesFromOne(Complete):
    """Built-in slopes begin with 1, at j = 0."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        return super().allow(with_slopes(options, from_one), q, k)


@fault("ALB-2", claims=BUILT_IN, caught_by=USUAL, trigger="H is no power of two")
class EvenPowers(Complete):
    """The heads after a power of two have even powers of 2^(-4/n), which others have already."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        power = 1 << (self.config.n_heads.bit_length() - 1)
        places = torch.arange(self.config.n_heads) % power
        return super().allow(with_slopes(options, lambda slopes: slopes[places]), q, k)
