"""Faults that SCL must catch: an explicit scale."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from mha.conformance.faults.base import Complete
from mha.conformance.faults.families import hooked
from mha.conformance.faults.fault import fault
from mha.implementations.formula import scores_of


@fault("SCL-1", caught_by="an_explicit_scale_is_the_scale", trigger="a scale of 0")
class ZeroScaleIsNone(Complete):
    """A scale of 0 is read as none: `scale or d_k**-0.5`."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        self.options = self.options.change(scale=self.options.scale or None)
        return super().score(q, k)


@fault("SCL-1", caught_by="the_usual_scale_changes_nothing", trigger="an explicit scale")
class ScaledTwice(Complete):
    """An explicit scale multiplies scores that are scaled already."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        if self.options.scale is None:
            return scores
        return scores / math.sqrt(self.config.head_dim)


@fault(
    "SCL-1", caught_by="gradients_have_the_explicit_scale", trigger="an explicit scale, backwards"
)
class UsualScaleBackwards(Complete):
    """The backward pass has the usual scale, whatever the call says."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        if not self.options.scale:
            return super().score(q, k)
        factor = 1 / (math.sqrt(self.config.head_dim) * self.options.scale)
        return hooked(super().score(q, k), lambda gradient: gradient * factor)


@fault("SCL-1", caught_by="an_explicit_scale_is_the_scale", trigger="a negative scale")
class AbsoluteScale(Complete):
    """The sign of a scale is lost."""

    def forward(self, *inputs: Any, scale: float | None = None, **options: Any) -> Any:
        return super().forward(*inputs, scale=None if scale is None else abs(scale), **options)


@fault(
    "SCL-1",
    caught_by="a_scale_goes_with_other_options",
    trigger="a scale and a window",
)
class ScaleForgottenBesideWindow(Complete):
    """With a window, an explicit scale is ignored."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        if self.options.window is None:
            return super().score(q, k)
        return scores_of(q, k, self.options.change(scale=None), self.config.head_dim**-0.5)
