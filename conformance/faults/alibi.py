"""Faults that ALB must catch: a bias that grows with the distance of a key."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.faults.base import CLAIMS, Complete
from mha.conformance.faults.families import hooked
from mha.conformance.faults.fault import fault
from mha.spec import Alibi, Options, Scores

Allowed = tuple[Tensor, Tensor]
EQUAL = "alibi_is_the_float_mask_of_its_slopes"
BOTTOM_RIGHT = replace(CLAIMS, causal="bottom_right", scores=Scores(alibi=Alibi("symmetric")))


def _sloped(options: Options, slopes: tuple[float, ...] | None) -> Options:
    """Return options with other slopes, if they have any."""
    if options.alibi is None:
        return options
    return options.change(alibi=slopes)


@fault("ALB-1", caught_by=EQUAL)
@fault("EFF-1", caught_by="slopes_have_an_effect")
class SlopesIgnored(Complete):
    """Slopes have no effect."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        return super().allow(_sloped(options, None), q, k)


@fault("ALB-1", caught_by=EQUAL, source="https://github.com/meta-pytorch/attention-gym/pull/86")
class SlopesTurnedRound(Complete):
    """The sign of the bias is turned round."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        return super().allow(_sloped(options, tuple(-slope for slope in options.alibi or ())), q, k)


@fault("ALB-1", caught_by="alibi_goes_with_other_options", trigger="grouped heads")
class SlopesOfTheKeyHeads(Complete):
    """The query heads that share a key have the slope of the first of them."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        shared = self.config.n_heads // self.config.kv_heads
        slopes = options.alibi or ()
        of_groups = tuple(slopes[head // shared * shared] for head in range(len(slopes)))
        return super().allow(_sloped(options, of_groups), q, k)


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
        slopes = torch.tensor(options.alibi).to(q).view(-1, 1, 1)
        starts = torch.arange(k.shape[2], device=q.device) // 16 * 16
        return allowed, bias - slopes * starts


@fault("ALB-1", caught_by="gradients_have_the_slopes", trigger="slopes, backwards")
class SlopesBackwards(Complete):
    """With slopes, the gradients of the scores are halved."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        factor = 1.0 if self.options.alibi is None else 0.5
        return hooked(super().score(q, k), lambda gradient: gradient * factor)
