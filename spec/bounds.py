"""Rounding: unit roundoffs, and numbers that carry the error they may have.

Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., chapters 2 and 3. No constant here is tuned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from mha.spec.dtypes import torch_dtype, traits_of


@dataclass(frozen=True, slots=True)
class Units:
    """Roundoffs of one dtype.

    accumulate: of the sums (float32 for float32 and below), plus that of the oracle, which rounds in float64 itself.
    store: of the dtype itself, plus the oracle's.
    subnormal: half the smallest subnormal of the dtype, the error of storing a number that underflows.
    flush: smallest normal number of the accumulator, below which a result may be flushed to zero.
    largest: the largest number of the dtype, where results of ordinary size may reach it (float16), else infinity.
    """

    accumulate: float
    store: float
    subnormal: float
    flush: float
    largest: float

    def gamma(self, terms: int) -> float:
        """Relative error of a sum of products of `terms` terms in any order: n u / (1 - n u), infinite if n u >= 1."""
        error = terms * self.accumulate
        return error / (1 - error) if error < 1 else float("inf")

    def gammas(self, terms: Tensor) -> Tensor:
        """Return `gamma` of each number of a float64 tensor."""
        error = terms * self.accumulate
        return error / (1 - error).clamp(min=0.0)

    def coarser(self, other: Units) -> Units:
        """Return the coarser roundoff of each kind."""
        worst = {field.name: max(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        return Units(**worst | {"largest": min(self.largest, other.largest)})


def units_of(dtype: torch.dtype) -> Units:
    """Return the roundoffs with which an implementation may compute in `dtype`."""
    traits = traits_of(dtype)
    accumulator = torch.finfo(torch_dtype(traits.accumulator))
    oracle = torch.finfo(torch.float64).eps / 2
    info = torch.finfo(dtype)
    return Units(
        accumulate=accumulator.eps / 2 + oracle,
        store=info.eps / 2 + oracle,
        subnormal=info.tiny * info.eps / 2,
        flush=accumulator.tiny,
        largest=info.max if traits.narrow else float("inf"),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Ball:
    """Numbers known up to an error: the exact value is within `rad` of `mid`, element by element, both float64."""

    mid: Tensor
    rad: Tensor

    @staticmethod
    def exact(value: Tensor) -> Ball:
        """Take stored numbers, which carry no error, into float64."""
        mid = value.detach().double()
        return Ball(mid, torch.zeros_like(mid))

    @staticmethod
    def stack(balls: Sequence[Ball], dim: int) -> Ball:
        """Stack along a new dimension."""
        return Ball(torch.stack([ball.mid for ball in balls], dim), torch.stack([ball.rad for ball in balls], dim))

    def flatten(self, start: int, end: int = -1) -> Ball:
        """Join the dimensions from `start` to `end`."""
        return Ball(self.mid.flatten(start, end), self.rad.flatten(start, end))

    def sum(self, dim: int) -> Ball:
        """Sum over a dimension; the errors add up."""
        return Ball(self.mid.sum(dim), self.rad.sum(dim))

    def known(self) -> Ball:
        """The same, where a NaN is one by policy: it is known without error."""
        return Ball(self.mid, self.rad.masked_fill(self.mid.isnan(), 0.0))

    @property
    def size(self) -> Tensor:
        """The largest magnitude that the exact value can have."""
        return self.mid.abs() + self.rad

    @property
    def mT(self) -> Ball:
        """The last two dimensions exchanged."""
        return Ball(self.mid.mT, self.rad.mT)

    def times(self, other: Ball, relative: Tensor | float) -> Ball:
        """Return self @ other, computed with a relative error in each product.

        relative: of the products of one row of `self`, one number or one for each row.
        """
        spread = self.rad + relative * self.size
        return Ball(self.mid @ other.mid, self.mid.abs() @ other.rad + spread @ other.size)

    def __getitem__(self, index: Any) -> Ball:
        return Ball(self.mid[index], self.rad[index])

    def stored(self, units: Units) -> Ball:
        """Round to the storage dtype; where the number or its error may overflow, nothing is known of it."""
        rad = self.rad + units.store * self.size + units.subnormal
        if units.largest < float("inf"):
            rad = rad.masked_fill(self.size >= units.largest, float("inf"))
        return Ball(self.mid, rad.nan_to_num(nan=float("inf"), posinf=float("inf")))


def affine(x: Ball, weight: Tensor, bias: Tensor | None, units: Units, rounded: bool = False) -> Ball:
    """Return x @ weight.T + bias, computed in the accumulator and then stored, once or before the bias too.

    x: (..., n); weight: (m, n); bias: (m,) or None; all exact but x.
    rounded: whether x, weight and bias are rounded to the storage dtype before, as under autocast.
    """
    x = x.stored(units) if rounded else x
    matrix = weight.detach().double().T
    terms = matrix.shape[0] + 1
    relative = units.gamma(terms) + (units.store if rounded else 0.0)
    product = Ball(x.mid @ matrix, (x.rad + relative * x.size) @ matrix.abs() + terms * units.flush)
    if bias is None:
        return product.stored(units)
    shift = bias.detach().double()
    # torch's own linear layer stores the product first where its input is not dense.
    product = product.stored(units)
    return Ball(product.mid + shift, product.rad + relative * shift.abs()).stored(units)
