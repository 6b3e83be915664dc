"""The unit roundoffs of a dtype, its range, and the relative errors that follow from them.

Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 2002, chapters 2 and 3. No
constant here is tuned. The symbols are those of `mha.spec.core`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from mha.spec.dtypes import torch_dtype, traits_of
from mha.spec.rounding import Rounding

# The largest number whose exponential is taken. A bound of e^600 proves nothing, but it is finite.
LARGEST_LOG = 600.0
# What "tf32" does to a factor: 10 bits of the fraction are kept, and the others dropped.
TF32 = 2.0**-10


def compounded(one: float, other: float) -> float:
    """Return `compound` of two numbers; infinite where the first one is.

    >>> compounded(0.5, 1.0), compounded(float("inf"), 0.0)
    (2.0, inf)
    """
    return one + other + one * other if other else one


def compound(first: Tensor, *others: Tensor | float) -> Tensor:
    """Return a (+) b (+) ..., the relative error of a product of factors with these errors.

    >>> compound(torch.tensor(0.5), 1.0)
    tensor(2.)
    """
    total = first
    for other in others:
        total = total + other + total * other
    return total


@dataclass(frozen=True, slots=True)
class Units:
    """The roundoffs of one dtype, and its range.

    accumulate: u_a, unit roundoff of the accumulator, plus that of the oracle, which computes in
        float64 itself.
    store: u_s, unit roundoff of the dtype itself, plus the oracle's.
    subnormal: eta_s, half the smallest subnormal of the dtype: the error of storing a number that
        underflows.
    flush: eta_a, the smallest normal number of the accumulator: smaller results may be flushed to
        zero.
    largest: the largest number of the dtype, if results of ordinary size may exceed it (float16),
        else infinity.
    product: e_p, the relative error of a product, if its factors are rounded before they are
        multiplied (`Rounding.products`).
    limbs: how many products stand for one then.

    >>> half, single = units_of(torch.bfloat16), units_of(torch.float32)
    >>> half.store > single.store == half.accumulate
    True
    """

    accumulate: float
    store: float
    subnormal: float
    flush: float
    largest: float
    product: float = 0.0
    limbs: int = 1

    def gamma(self, terms: int) -> float:
        """Return gamma(n), the relative error of a sum of n terms in any order.

        It is infinite if n u_a >= 1. Source: Higham 2002, lemma 3.1 and section 3.1.

        >>> Units(accumulate=0.125, store=0.125, subnormal=0.0, flush=0.0, largest=1.0).gamma(4)
        1.0
        """
        error = terms * self.accumulate
        if error >= 1:
            return float("inf")
        return error / (1 - error)

    def partial_sums(self, terms: int, pieces: int) -> float:
        """Return the relative error of a sum of n products, some of whose partial sums are stored.

        pieces: how many of them.

        >>> units_of(torch.float32).partial_sums(8, 4) == units_of(torch.float32).gamma(8)
        True
        """
        # gamma(n) (+) e_p (+) (1 + u_s - u_a)^t - 1, for t partial sums
        return compounded(self.products(terms), self.stores(pieces))

    def products(self, terms: int) -> float:
        """Return gamma(n) (+) e_p, the relative error of a sum of n products in any order.

        >>> units_of(torch.float32, Rounding(products="tf32")).products(8) > 2**-9
        True
        """
        return compounded(self.gamma(self.limbs * terms), self.product)

    def stores(self, pieces: int) -> float:
        """Return what storing so many partial sums adds to the relative error of a sum.

        >>> units_of(torch.float32).stores(4), units_of(torch.bfloat16).stores(1) > 0.003
        (0.0, True)
        """
        # (1 + u_s - u_a)^t - 1
        return math.expm1(min(pieces * math.log1p(self.store - self.accumulate), LARGEST_LOG))

    def gammas(self, terms: Tensor) -> Tensor:
        """Return `gamma` of every number of a float64 tensor.

        >>> bool(units_of(torch.float32).gammas(torch.tensor([2.0**30])).isinf())
        True
        """
        error = terms * self.accumulate
        return error / (1 - error).clamp(min=0.0)

    def of_products(self, terms: Tensor) -> Tensor:
        """Return `products` of every number of a float64 tensor.

        >>> bool(units_of(torch.float32).of_products(torch.tensor([2.0**30])).isinf())
        True
        """
        gammas = self.gammas(self.limbs * terms)
        return compound(gammas, self.product) if self.product else gammas

    def coarser(self, other: Units) -> Units:
        """Return the larger roundoff of each kind, and the smaller range.

        >>> single, double = units_of(torch.float32), units_of(torch.float64)
        >>> double.coarser(single).accumulate == single.accumulate
        True
        """
        worst: dict[str, Any] = {}
        for field in fields(self):
            worst[field.name] = max(getattr(self, field.name), getattr(other, field.name))
        return Units(**worst | {"largest": min(self.largest, other.largest)})


def units_of(dtype: torch.dtype, rounding: Rounding | None = None) -> Units:
    """Return the roundoffs with which an implementation may compute in a dtype.

    rounding: what it declares; None for operations that round to nearest.

    Source: the table of `mha.spec.dtypes`.

    >>> units_of(torch.float16).largest, units_of(torch.float32).largest
    (65504.0, inf)
    """
    rounding = Rounding() if rounding is None else rounding
    traits, info = traits_of(dtype), torch.finfo(dtype)
    accumulator = torch.finfo(torch_dtype(traits.accumulator))
    if rounding.accumulator == "float16" and dtype == torch.float16:
        accumulator = info
    added = accumulator.eps / 2
    if rounding.accumulator == "truncated":
        added = accumulator.eps
    stored = info.eps / 2
    if traits.half and rounding.mode != "nearest":
        stored = info.eps
    lost = info.tiny * stored
    if traits.half:
        stored = _counted_thrice(stored, rounding)
    if rounding.flushes:
        lost = info.tiny
    if not traits.half:  # a dtype that is its own accumulator rounds each number as sums do
        stored = max(stored, added)
    product, limbs = 0.0, 1
    if dtype == torch.float32:
        product, limbs = _product_error(rounding)
    oracle = torch.finfo(torch.float64).eps / 2
    return Units(
        accumulate=added + oracle,
        store=stored + oracle,
        subnormal=lost,
        flush=accumulator.tiny,
        largest=info.max if traits.narrow else float("inf"),
        product=product,
        limbs=limbs,
    )


def _counted_thrice(stored: float, rounding: Rounding) -> float:
    """Return u_s for which three casts in a row, the most that are counted, give up to 3 u_s."""
    if rounding.mode != "stochastic":
        return stored  # one that goes up errs by u / (1 + u): (1 + u / (1 + u))^3 <= 1 + 3 u
    return float(((1 + stored) ** 3 - 1) / 3)


def _product_error(rounding: Rounding) -> tuple[float, int]:
    """Return e_p, of two numbers of float32 that are rounded before their product, and `limbs`."""
    u = torch.finfo(torch.bfloat16).eps
    if rounding.mode == "nearest":
        u = u / 2
    if rounding.products == "bf16x3":
        # x = x_1 + x_2 + r with |x_2| <= u (1 + u) |x| and |r| <= u^2 |x|, and x_2 y_2 is left out.
        return (1 + u**2) ** 2 * (1 + u**2 * (1 + u) ** 2) - 1, 3
    of_factor = {"ieee": 0.0, "tf32": TF32, "bf16": u}[rounding.products]
    return (1 + of_factor) ** 2 - 1, 1


@dataclass(frozen=True, slots=True)
class ScaledUnits:
    """The roundoffs of a float8 dtype whose numbers are scaled.

    store: u_8.
    subnormal: as in `Units`, scaled.
    """

    store: float
    subnormal: float

    @staticmethod
    def of(dtype: torch.dtype, size: Tensor) -> ScaledUnits:
        """Return those for a scale of at most twice what the largest number needs.

        size: the magnitudes of the numbers.
        """
        info, largest = torch.finfo(dtype), 0.0
        if size.numel():
            largest = float(size.amax())
        return ScaledUnits(info.eps / 2, 2 * largest / info.max * info.tiny * info.eps / 2)
