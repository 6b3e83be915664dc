"""The inputs of the attention core: heads, and the roundoffs of each step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha.spec.bounds import Ball
from mha.spec.dtypes import traits_of
from mha.spec.rounding import Rounding
from mha.spec.units import Units, units_of


@dataclass(frozen=True, slots=True)
class Precision:
    """The roundoffs of each step.

    units: of the projections, scores and contexts.
    softmax: of the softmax, coarser where it is computed in float32.
    rounding: what the implementation declares.
    exponential: error of the exponential, in roundoffs of the accumulator.

    >>> single = Precision.of(torch.float64, Rounding(softmax_in_float32=True))
    >>> single.units.accumulate < 1e-15 < single.softmax.accumulate
    True
    """

    units: Units
    softmax: Units
    rounding: Rounding
    exponential: int

    @staticmethod
    def of(dtype: torch.dtype, rounding: Rounding) -> Precision:
        """Return the roundoffs of an implementation.

        dtype: the storage dtype.
        rounding: what the implementation declares.
        """
        units = units_of(dtype, rounding)
        softmax = units.coarser(units_of(torch.float32)) if rounding.softmax_in_float32 else units
        return Precision(units, softmax, rounding, rounding.exponential(half=traits_of(dtype).half))


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """The inputs of the core.

    query: (B, H, L, d_k).
    key, value: (B, H, S, d_k), each key/value head repeated for its query heads.
    allowed: boolean (B, H, L, S), the set A of each query.
    bias: b, the float mask and the bias of slopes, (B, H, L, S), or None.
    bare_key: k', (B, H, S, d_k), where the keys have a bias that an implementation may leave out,
        or None.
    sinks: z, (H, 1, 1), where the last key is one with this score, and a value of zeros, or None;
        (H, L, 1) where rows of several heads share a key.
    sink_in_lse: whether the log-sum-exp has it too.
    cap: c, where scores are c tanh(s / c), or None.
    caps_bias: whether b is a part of s then, or added afterwards.

    >>> one = Ball.exact(torch.ones(1, 1, 1, 2))
    >>> Heads(one, one, one, torch.ones(1, 1, 1, 1, dtype=torch.bool)).forbidden
    tensor([[[[False]]]])
    """

    query: Ball
    key: Ball
    value: Ball
    allowed: Tensor
    bias: Ball | None = None
    bare_key: Ball | None = None
    sinks: Tensor | None = None
    sink_in_lse: bool = True
    cap: float | None = None
    caps_bias: bool = False

    def of_queries(self, part: slice) -> Heads:
        """Return the same for some of the queries."""
        bias = None if self.bias is None else self.bias[:, :, part]
        return replace(
            self, query=self.query[:, :, part], allowed=self.allowed[:, :, part], bias=bias
        )

    @property
    def forbidden(self) -> Tensor:
        """Boolean (B, H, L, S): the pairs that may not attend."""
        return ~self.allowed

    @property
    def counts(self) -> Tensor:
        """How many keys each query may attend to, but at least 1, (B, H, L, 1), in float64."""
        return self.allowed.sum(-1, keepdim=True).clamp(min=1).double()

    @property
    def empty(self) -> Tensor:
        """Boolean (B, H, L, 1): the rows without an allowed key."""
        return ~self.allowed.any(-1, keepdim=True)


def side_by_side(heads: Tensor) -> Tensor:
    """Lay heads (B, H, length, width) side by side, (B, length, H * width).

    >>> side_by_side(torch.tensor([[[[1, 2]], [[3, 4]]]]))
    tensor([[[1, 2, 3, 4]]])
    """
    return heads.transpose(1, 2).flatten(2)
