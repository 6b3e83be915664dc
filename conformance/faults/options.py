"""Faults that GRD and STA must catch: options beside others, and after a call with other ones."""

from __future__ import annotations

from torch import Tensor

from mha.conformance.faults.base import Complete
from mha.conformance.faults.fault import fault
from mha.spec import Options


@fault(
    "GRD-1",
    caught_by="gradients_go_with_several_options",
    trigger="a cap and a window, backwards",
)
class FactorForgottenBesideWindow(Complete):
    """The backward pass of a call with a window lacks the factor 1 - tanh^2 of the cap."""

    def cap(self, scores: Tensor, bias: Tensor) -> Tensor:
        result = super().cap(scores, bias)
        if self.options.window is None:
            return result
        return scores + bias + (result - scores - bias).detach()


@fault(
    "STA-3",
    caught_by="options_of_an_earlier_call_are_forgotten",
    trigger="a second call with another window",
)
class WindowOfTheFirstCall(Complete):
    """The mask of a window is kept by the numbers of queries and keys, whatever the window is."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if options.window is not None:
            self.kept = getattr(self, "kept", {})
            lengths = q.shape[2], k.shape[2]
            options = options.change(window=self.kept.setdefault(lengths, options.window))
        return super().allow(options, q, k)


@fault(
    "STA-3",
    caught_by="options_of_an_earlier_call_are_forgotten",
    trigger="a call without a scale after one with it",
)
class ScaleStays(Complete):
    """A scale that a call gives is that of later calls, too, which give none."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        if self.options.scale is not None:
            self.scale = self.options.scale
        return super().score(q, k)
