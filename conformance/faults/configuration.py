"""Faults that CFG must catch: constructors and their validation."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.base import Complete, Correct
from mha.conformance.faults.fault import fault
from mha.spec import Config, Weights


@fault("CFG-2", source="https://github.com/pytorch/pytorch/pull/193728")
class NoValidation(Correct):
    """Nothing is validated at construction, so that the first call raises."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, 1, bias)
        self.config = Config(d_model, n_heads, bias=bias)


@fault("CFG-1", trigger="d_model % n_heads != 0")
class AnotherNumberOfHeads(NoValidation):
    """The width of a head is d_model // n_heads, and their number is what that width gives."""

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)


@fault("CFG-1", trigger="d_model % n_heads != 0")
class ColumnsUnused(NoValidation):
    """The last d_model % n_heads columns of the projections are left out, and those of the context
    are zeros.
    """

    def split(self, x: Tensor) -> Tensor:
        return super().split(x[..., : self.config.n_heads * self.config.head_dim])

    def merge(self, x: Tensor) -> Tensor:
        context = super().merge(x)
        return F.pad(context, (0, self.config.d_model - context.shape[-1]))


@fault("CFG-2", script_shows=False, source="https://github.com/pytorch/pytorch/pull/133169")
class RefusalSaysNothing(Complete):
    """The error for an impossible configuration does not name the numbers."""

    def __init__(self, config: Config, weights: Weights) -> None:
        assert config.n_heads == 0 or config.d_model % config.n_heads == 0
        super().__init__(config, weights)


@fault("CFG-3", trigger="n_heads < 0")
class NegativeHeads(Complete):
    """A negative number of heads is read as a positive one."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(replace(config, n_heads=abs(config.n_heads)), weights)


@fault("CFG-4", caught_by="every_divisor_is_right_or_refused", trigger="d_k = 1, H > 2")
class HeadsOfWidthOneDropped(Correct):
    """Of more than two heads of width 1, the last one is left out."""

    def merge(self, x: Tensor) -> Tensor:
        context = super().merge(x)
        if self.config.head_dim > 1 or self.config.n_heads <= 2:
            return context
        return F.pad(context[..., :-1], (0, 1))


@fault("CFG-4", caught_by="every_divisor_is_accepted", trigger="d_k = 1, H > 2")
class RefusesHeadsOfWidthOne(Correct):
    """Heads of width 1 are refused."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, bias)
        if d_model == n_heads > 2:
            raise ValueError(f"d_model ({d_model}) must be larger than n_heads ({n_heads})")


@fault("CFG-5", trigger="bias=False", source="https://github.com/pytorch/pytorch/issues/52257")
class BiasAllTheSame(Complete):
    """Built without biases, it still has one for the output."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        if not config.has_bias("o"):
            self.b_o = torch.nn.Parameter(weights.w_o.new_zeros(config.d_model))


@fault("CFG-6")
class DropoutUnchecked(Complete):
    """An impossible dropout probability is accepted."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(replace(config, dropout=0.0), weights)
