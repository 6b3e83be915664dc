"""Faults that CAP must catch: scores that are capped by a hyperbolic tangent."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.faults.base import CLAIMS, Complete
from mha.conformance.faults.families import hooked
from mha.conformance.faults.fault import fault
from mha.implementations.formula import capped
from mha.spec import Scores

PLACED = "a_softcap_acts_where_it_is_declared_to"
CAPPED_SUM = replace(CLAIMS, scores=Scores(softcap="after_bias"))


@fault("CAP-1", caught_by=PLACED)
@fault("EFF-1", caught_by="a_softcap_has_an_effect")
class SoftcapIgnored(Complete):
    """A cap has no effect."""

    def cap(self, scores: Tensor, bias: Tensor) -> Tensor:
        return scores + bias


@fault("CAP-1", caught_by=PLACED, trigger="a cap and a mask")
class CappedAfterTheMask(Complete):
    """The cap acts after the mask, so that a masked key has the score -c."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        cap = self.options.softcap
        if cap is None:
            return super().weigh(scores, allowed)
        return super().weigh(scores.masked_fill(~allowed, -cap), torch.ones_like(allowed))


@fault("CAP-1", claims=CAPPED_SUM, caught_by=PLACED, trigger="a cap and a float mask")
class CappedBeforeTheBias(Complete):
    """The cap acts before the float mask is added, although it is declared to act on the sum."""


@fault("CAP-1", caught_by=PLACED, trigger="a cap and a float mask")
class CappedAfterTheBias(Complete):
    """The cap acts on the sum with the float mask."""

    def cap(self, scores: Tensor, bias: Tensor) -> Tensor:
        return capped(scores + bias, self.options.softcap)


@fault("CAP-1", caught_by=PLACED, trigger="a cap")
class CappedBeforeTheScale(Complete):
    """The cap acts on the products, before they are scaled."""

    def cap(self, scores: Tensor, bias: Tensor) -> Tensor:
        width = math.sqrt(self.config.head_dim)
        return capped(scores * width, self.options.softcap) / width + bias


@fault("CAP-1", caught_by="a_softcap_goes_with_other_options", trigger="a cap and a window")
class CapForgottenBesideWindow(Complete):
    """With a window, the cap is ignored."""

    def cap(self, scores: Tensor, bias: Tensor) -> Tensor:
        softcap = self.options.softcap if self.options.window is None else None
        return capped(scores, softcap) + bias


@fault("CAP-2", caught_by="gradients_have_the_factor_of_the_cap", trigger="a cap, backwards")
class FactorOfTheCappedScore(Complete):
    """The gradient has the factor 1 - (c tanh)^2: the capped score is not divided by the cap."""

    def cap(self, scores: Tensor, bias: Tensor) -> Tensor:
        result = capped(scores, self.options.softcap).detach()
        if self.options.softcap:
            scores = hooked(scores * 1.0, lambda gradient: gradient * (1 - result.square()))
        return scores + (result - scores.detach()) + bias


@fault(
    "CAP-3", caught_by="a_cap_far_above_the_scores_is_right", trigger="a cap far above the scores"
)
class LowTangent(Complete):
    """The tangent of a small number is 0, as in a table."""

    def cap(self, scores: Tensor, bias: Tensor) -> Tensor:
        cap = self.options.softcap
        small = scores.abs() < 2e-3 * (cap or 0.0)
        return capped(scores, cap).masked_fill(small, 0.0) + bias


@fault(
    "CAP-3",
    caught_by="a_cap_of_zero_caps_nothing_or_is_refused",
    trigger="a cap of 0",
    source="https://github.com/NVIDIA/Megatron-LM/pull/6590",
)
class ZeroCapIsZero(Complete):
    """A cap of 0 makes all scores 0."""

    def cap(self, scores: Tensor, bias: Tensor) -> Tensor:
        if self.options.softcap == 0:
            return scores * 0 + bias
        return super().cap(scores, bias)


@fault(
    "CAP-3",
    caught_by="scores_far_above_the_cap_give_finite_results",
    trigger="scores 90 times the cap",
)
class TangentOfExponentials(Complete):
    """The tangent is (e^x - e^-x) / (e^x + e^-x), which is NaN for large x."""

    def cap(self, scores: Tensor, bias: Tensor) -> Tensor:
        cap = self.options.softcap
        if not cap:
            return scores + bias
        x = scores / cap
        return cap * (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()) + bias
