"""Rounding: the unit roundoffs of a dtype, and numbers that carry a bound on their error.

Sources: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 2002, chapters 2 and 3;
midpoint-radius arithmetic as in Arb (Johansson 2017), with radii in float64. No constant here is
tuned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from mha.spec.dtypes import torch_dtype, traits_of
from mha.spec.rounding import Rounding

# The largest number whose exponential is taken. A bound of e^600 proves nothing, but it is finite.
LARGEST_LOG = 600.0
# The most terms of weighted distances that are added up one by one.
MOST_DISTANCES = 1 << 18


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
    product: relative error of a product, if its factors are rounded before they are multiplied
        (`Rounding.products`).
    limbs: how many products stand for one then.

    >>> units_of(torch.bfloat16).store > units_of(torch.float32).store == units_of(torch.bfloat16).accumulate
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
        """Return n u_a / (1 - n u_a), the relative error of a sum of n terms in any order; infinite
        if n u_a >= 1.

        Source: Higham 2002, lemma 3.1 and section 3.1.

        >>> Units(accumulate=0.125, store=0.125, subnormal=0.0, flush=0.0, largest=1.0).gamma(4)
        1.0
        """
        error = terms * self.accumulate
        return error / (1 - error) if error < 1 else float("inf")

    def partial_sums(self, terms: int, pieces: int) -> float:
        """Return the relative error of a sum of n products, `pieces` of whose partial sums are
        stored.

        >>> units_of(torch.float32).partial_sums(8, 4) == units_of(torch.float32).gamma(8)
        True
        """
        # gamma(n) (+) e_p (+) (1 + u_s - u_a)^t - 1, for t partial sums
        return compounded(self.products(terms), self.stores(pieces))

    def products(self, terms: int) -> float:
        """Return the relative error of a sum of n products in any order, whose factors may be
        rounded first.

        >>> units_of(torch.float32, Rounding(products="tf32")).products(8) > 2**-9
        True
        """
        # gamma(n) (+) e_p
        return compounded(self.gamma(self.limbs * terms), self.product)

    def stores(self, pieces: int) -> float:
        """Return what it adds to the relative error of a sum that so many partial sums on the way
        are stored.

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
        worst = {
            field.name: max(getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
        }
        return Units(**worst | {"largest": min(self.largest, other.largest)})


def units_of(dtype: torch.dtype, rounding: Rounding | None = None) -> Units:
    """Return the roundoffs with which an implementation may compute in a dtype; see
    `mha.spec.dtypes`.

    rounding: what it declares; None for operations that round to nearest.

    >>> units_of(torch.float16).largest, units_of(torch.float32).largest
    (65504.0, inf)
    """
    traits, info, oracle = traits_of(dtype), torch.finfo(dtype), torch.finfo(torch.float64).eps / 2
    rounding = Rounding() if rounding is None else rounding
    adds_in_half = rounding.accumulator == "float16" and dtype == torch.float16
    accumulator = info if adds_in_half else torch.finfo(torch_dtype(traits.accumulator))
    added = accumulator.eps / (1 if rounding.accumulator == "truncated" else 2)
    stored = info.eps / (1 if traits.half and rounding.mode != "nearest" else 2)
    of_factors, limbs = _product_error(rounding) if dtype == torch.float32 else (0.0, 1)
    return Units(
        accumulate=added + oracle,
        store=max(stored, 0.0 if traits.half else added) + oracle,
        subnormal=info.tiny if rounding.flushes else info.tiny * stored,
        flush=accumulator.tiny,
        largest=info.max if traits.narrow else float("inf"),
        product=of_factors,
        limbs=limbs,
    )


def _product_error(rounding: Rounding) -> tuple[float, int]:
    """Return e_p, the relative error of a product of two numbers of float32 that are rounded first,
    and `limbs`.
    """
    bfloat16 = torch.finfo(torch.bfloat16).eps / (2 if rounding.mode == "nearest" else 1)
    if rounding.products == "bf16x3":
        # x = x_1 + x_2 + r with |x_2| <= u (1 + u) |x| and |r| <= u^2 |x|, and x_2 y_2 is left out.
        return (1 + bfloat16**2) ** 2 * (1 + bfloat16**2 * (1 + bfloat16) ** 2) - 1, 3
    of_factor = {"ieee": 0.0, "tf32": 2.0**-10, "bf16": bfloat16}[rounding.products]
    return (1 + of_factor) ** 2 - 1, 1


@dataclass(frozen=True, slots=True, eq=False)
class Ball:
    """Numbers known up to an error: each exact value is within `rad` of `mid`. Both are float64, of
    one shape.

    >>> Ball(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0])).size
    tensor([1.5000, 2.0000])
    """

    mid: Tensor
    rad: Tensor

    @staticmethod
    def exact(value: Tensor) -> Ball:
        """Return stored numbers of any dtype, which carry no error.

        >>> Ball.exact(torch.tensor([0.5], dtype=torch.float16))
        Ball(mid=tensor([0.5000], dtype=torch.float64), rad=tensor([0.], dtype=torch.float64))
        """
        mid = value.detach().double()
        return Ball(mid, torch.zeros_like(mid))

    @staticmethod
    def joined(parts: Sequence[Ball], dim: int) -> Ball:
        """Join balls along a dimension."""
        return Ball(
            torch.cat([part.mid for part in parts], dim),
            torch.cat([part.rad for part in parts], dim),
        )

    def flatten(self, start: int, end: int = -1) -> Ball:
        """Join the dimensions from `start` to `end`."""
        return Ball(self.mid.flatten(start, end), self.rad.flatten(start, end))

    def sum(self, dim: int) -> Ball:
        """Sum over a dimension; errors add up."""
        return Ball(self.mid.sum(dim), self.rad.sum(dim))

    def known(self) -> Ball:
        """Return the same numbers, NaN without error: a NaN here is the declared policy."""
        return Ball(self.mid, self.rad.masked_fill(self.mid.isnan(), 0.0))

    def covering(self, other: Ball) -> Ball:
        """Return the same numbers, with the larger radius of the two: the other are equal to them
        on paper.
        """
        return Ball(self.mid, torch.maximum(self.rad, other.rad))

    @property
    def size(self) -> Tensor:
        """|mid| + rad, the largest magnitude that the exact values may have."""
        return self.mid.abs() + self.rad

    @property
    def mT(self) -> Ball:
        """The last two dimensions exchanged."""
        return Ball(self.mid.mT, self.rad.mT)

    def times(self, other: Ball, relative: Tensor | float) -> Ball:
        """Return self @ other, where every product has a relative error.

        relative: one number, or one for each row of `self`, (..., rows, 1).

        >>> half = Ball(torch.eye(1).double(), torch.full((1, 1), 0.5).double())
        >>> half.times(Ball.exact(torch.full((1, 1), 4.0)), 0.0).rad
        tensor([[2.]], dtype=torch.float64)
        """
        # rad = |A| rad B + (rad A + r (|A| + rad A)) (|B| + rad B)
        spread = self.rad + relative * self.size
        return Ball(self.mid @ other.mid, self.mid.abs() @ other.rad + spread @ other.size)

    def __getitem__(self, index: Any) -> Ball:
        return Ball(self.mid[index], self.rad[index])

    def stored(self, units: Units) -> Ball:
        """Round to the storage dtype; the radius is infinite where a number may overflow.

        >>> Ball.exact(torch.tensor([1.0, 7e4])).stored(units_of(torch.float16)).rad
        tensor([0.0005,    inf], dtype=torch.float64)
        """
        # rad += u_s (|x| + rad x) + eta_s
        rad = (
            (self.rad * (1 + units.store))
            .add_(self.mid.abs(), alpha=units.store)
            .add_(units.subnormal)
        )
        if units.largest < float("inf"):
            rad = rad.masked_fill(self.size >= units.largest, float("inf"))
        return Ball(self.mid, rad.nan_to_num(nan=float("inf"), posinf=float("inf")))

    def quantised(self, dtype: torch.dtype, units: Units) -> Ball:
        """Round to a float8 dtype with a scale, and then to the storage dtype; see
        `Rounding.heads_stored`.

        >>> Ball.exact(torch.tensor([1.0])).quantised(torch.float8_e5m2, units_of(torch.float32)).rad
        tensor([0.1250], dtype=torch.float64)
        """
        # r = u_8 (+) 3 u_a; what underflows is off by half of the smallest subnormal, scaled
        scaled = ScaledUnits.of(dtype, self.size)
        relative = compound(self.mid.new_tensor(scaled.store), 3 * units.accumulate)
        rad = self.rad * (1 + relative) + relative * self.mid.abs() + scaled.subnormal
        return Ball(self.mid, rad).stored(units)


@dataclass(frozen=True, slots=True)
class ScaledUnits:
    """The roundoffs of a float8 dtype whose numbers are scaled. store: u_8. subnormal: as in
    `Units`, scaled.
    """

    store: float
    subnormal: float

    @staticmethod
    def of(dtype: torch.dtype, size: Tensor) -> ScaledUnits:
        """Return those for numbers of these magnitudes, with a scale of at most twice what the
        largest one needs.
        """
        info, largest = torch.finfo(dtype), float(size.amax()) if size.numel() else 0.0
        return ScaledUnits(info.eps / 2, 2 * largest / info.max * info.tiny * info.eps / 2)


def compounded(one: float, other: float) -> float:
    """Return `compound` of two numbers; infinite where the first one is.

    >>> compounded(0.5, 1.0), compounded(float("inf"), 0.0)
    (2.0, inf)
    """
    return one + other + one * other if other else one


def compound(first: Tensor, *others: Tensor | float) -> Tensor:
    """Return the relative error of a product of factors with these relative errors: (1 + a)(1 +
    b)... - 1.

    >>> compound(torch.tensor(0.5), 1.0)
    tensor(2.)
    """
    total = first
    for other in others:
        total = total + other + total * other
    return total


def row_max(x: Tensor) -> Tensor:
    """Return the largest number of each row, 0 where rows have no elements.

    >>> row_max(torch.tensor([[1.0, 3.0], [2.0, -1.0]]))
    tensor([3., 2.])
    """
    return x.amax(-1) if x.shape[-1] else x.sum(-1)


def affine(
    x: Ball,
    weight: Tensor,
    bias: Tensor | None,
    units: Units,
    rounded: bool = False,
    others: int = 0,
) -> Ball:
    """Return y = x W^T + b, (..., m), computed in the accumulator and stored, before the bias is
    added too.

    x: (..., n). weight: W, (m, n), and bias: b, (m,), or None, both exact.
    rounded: whether x, W and b are first rounded to the storage dtype, as under autocast. others:
        to how many parts of the sum that are stored as well a stored one is added; the bias may be
        shared out among them.

    >>> y = affine(Ball.exact(torch.ones(2)), torch.ones(3, 2), torch.ones(3), units_of(torch.float32))
    >>> y.mid, bool((y.rad < 1e-5).all())
    (tensor([3., 3., 3.], dtype=torch.float64), True)
    """
    return affine_forms(x, weight, bias, units, rounded, others)[-1]


def affine_forms(
    x: Ball,
    weight: Tensor,
    bias: Tensor | None,
    units: Units,
    rounded: bool = False,
    others: int = 0,
) -> tuple[Ball, ...]:
    """Return x W^T and, if there is a bias, y; see `affine`."""
    x = x.stored(units) if rounded else x
    matrix = weight.detach().double()
    # rad = (rad x + r (|x| + rad x)) |W|^T + (n + 1) eta_a, with r = gamma(n + 1), and u_s where W
    # is rounded
    terms = matrix.shape[1] + 1
    # r (+)= (1 + u_s - u_a)^(t + 1) - 1, and 2 (t + 1) eta_s more, for t other parts: a share of
    # the bias is stored too
    stores = others + 1 if others else 0
    relative = units.partial_sums(terms, stores) + (units.store if rounded else 0.0)
    lost = terms * units.flush + 2 * stores * units.subnormal
    spread = (x.rad * (1 + relative)).add_(x.mid.abs(), alpha=relative)
    product = Ball(linear(x.mid, matrix), linear(spread, matrix.abs()).add_(lost))
    if stores and units.largest < float("inf"):
        overflows = (
            linear(x.size, matrix.abs()) + (0.0 if bias is None else bias.detach().abs())
            >= units.largest
        )
        product = Ball(product.mid, product.rad.masked_fill(overflows, float("inf")))
    product = product.stored(units)
    if bias is None:
        return (product,)
    # torch's own linear layer stores the product first if its input is not dense. Then rad += r
    # |b|.
    shift = bias.detach().double()
    return product, Ball(product.mid + shift, product.rad.add(shift.abs(), alpha=relative)).stored(
        units
    )


def weighted_distance(excess: Tensor, value: Tensor, context: Tensor) -> Tensor:
    """Return sum_j excess_j |v_j - o|, (B, H, L, d), for excess (B, H, L, S), value (B, H, S, d),
    context (B, H, L, d).

    Errors of the weights move a context only as far as the values differ from it, since sum_j p_j
    (v_j - o) = 0. With more than `MOST_DISTANCES` terms, it returns a bound by the Cauchy-Schwarz
    inequality, in a tenth of the time: it is 1.3 times as large for normal values and equal
    weights, and up to 6 times where one key has most of the weight.

    >>> equal = torch.ones(1, 1, 2, 1)
    >>> weighted_distance(torch.ones(1, 1, 1, 2), equal, equal[:, :, :1])
    tensor([[[[0.]]]])
    """
    keys = value.shape[2]
    if value.numel() * excess.shape[2] <= MOST_DISTANCES:
        distance = (value.unsqueeze(2) - context.unsqueeze(3)).abs_()
        return (excess.unsqueeze(3) @ distance).squeeze(3)
    # sqrt(sum_j e_j sum_j e_j (v_j - o)^2), around the mean value, so that little is lost in the
    # difference of squares
    centre = value.mean(2, keepdim=True)
    v, o, total = value - centre, context - centre, excess.sum(-1, keepdim=True)
    of_values, of_context = excess @ v.square(), total * o.square()
    squares = (of_values - 2 * o * (excess @ v) + of_context).clamp(min=0.0)
    rounding = (keys + 8) * torch.finfo(value.dtype).eps * 2 * (of_values + of_context)
    return (total * (squares + rounding)).sqrt()
