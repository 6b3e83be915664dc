"""Balls: numbers in float64 that carry a bound on their error, and the linear steps on them.

Sources: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 2002, chapter 3;
midpoint-radius arithmetic as in Arb (Johansson 2017), with radii in float64. No constant here is
tuned. The symbols are those of `mha.spec.core`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from mha.spec.units import ScaledUnits, compound
from mha.spec.units import Units as Units
from mha.spec.units import units_of as units_of

# The most terms of weighted distances that are added up one by one.
MOST_DISTANCES = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class Ball:
    """Numbers known up to an error: each exact value is within `rad` of `mid`.

    mid, rad: float64, of one shape.

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
        mid = torch.cat([part.mid for part in parts], dim)
        rad = torch.cat([part.rad for part in parts], dim)
        return Ball(mid, rad)

    def rearranged(self, change: Callable[[Tensor], Tensor]) -> Ball:
        """Return the same numbers in another order or shape, each with its radius."""
        return Ball(change(self.mid), change(self.rad))

    def flatten(self, start: int, end: int = -1) -> Ball:
        """Join the dimensions from `start` to `end`."""
        return self.rearranged(lambda x: x.flatten(start, end))

    def sum(self, dim: int) -> Ball:
        """Sum over a dimension; errors add up."""
        return Ball(self.mid.sum(dim), self.rad.sum(dim))

    def known(self) -> Ball:
        """Return the same numbers, NaN without error: a NaN here is the declared policy."""
        return Ball(self.mid, self.rad.masked_fill(self.mid.isnan(), 0.0))

    def covering(self, other: Ball) -> Ball:
        """Return the same numbers with the larger radius of two forms that are equal on paper."""
        return Ball(self.mid, torch.maximum(self.rad, other.rad))

    @property
    def size(self) -> Tensor:
        """|mid| + rad, the largest magnitude that the exact values may have."""
        return self.mid.abs() + self.rad

    @property
    def mT(self) -> Ball:
        """The last two dimensions exchanged."""
        return self.rearranged(lambda x: x.mT)

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
        rad = self.rad * (1 + units.store)
        rad = rad.add_(self.mid.abs(), alpha=units.store).add_(units.subnormal)
        if units.largest < float("inf"):
            rad = rad.masked_fill(self.size >= units.largest, float("inf"))
        return Ball(self.mid, rad.nan_to_num(nan=float("inf"), posinf=float("inf")))

    def quantised(self, dtype: torch.dtype, units: Units) -> Ball:
        """Round to a float8 dtype with a scale, and then to the storage dtype.

        See `Rounding.heads_stored`.

        >>> one, units = Ball.exact(torch.tensor([1.0])), units_of(torch.float32)
        >>> one.quantised(torch.float8_e5m2, units).rad
        tensor([0.1250], dtype=torch.float64)
        """
        # r = u_8 (+) 3 u_a; what underflows is off by half of the smallest subnormal, scaled
        scaled = ScaledUnits.of(dtype, self.size)
        relative = compound(self.mid.new_tensor(scaled.store), 3 * units.accumulate)
        rad = self.rad * (1 + relative) + relative * self.mid.abs() + scaled.subnormal
        return Ball(self.mid, rad).stored(units)


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
    """Return y = x W^T + b, (..., m), computed in the accumulator and stored.

    The product may be stored before the bias is added, too.

    x: (..., n).
    weight: W, (m, n), exact.
    bias: b, (m,), exact, or None.
    rounded: whether x, W and b are first rounded to the storage dtype, as under autocast.
    others: how many parts of the sum are stored beside this one and added to it; the bias may be
        shared out among them.

    >>> x, units = Ball.exact(torch.ones(2)), units_of(torch.float32)
    >>> y = affine(x, torch.ones(3, 2), torch.ones(3), units)
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
    matrix = weight.detach().double()
    terms = matrix.shape[1] + 1
    # With t other parts, t + 1 parts are stored, and a share of the bias with each.
    stores = others + 1 if others else 0
    # r = gamma(n + 1) (+) e_p (+) (1 + u_s - u_a)^(t + 1) - 1, and u_s where W is rounded
    relative = units.partial_sums(terms, stores)
    if rounded:
        x, relative = x.stored(units), relative + units.store
    # rad = (rad x + r (|x| + rad x)) |W|^T + (n + 1) eta_a + 2 (t + 1) eta_s
    lost = terms * units.flush + 2 * stores * units.subnormal
    spread = (x.rad * (1 + relative)).add_(x.mid.abs(), alpha=relative)
    product = Ball(linear(x.mid, matrix), linear(spread, matrix.abs()).add_(lost))
    if stores and units.largest < float("inf"):
        largest = linear(x.size, matrix.abs())
        if bias is not None:
            largest = largest + bias.detach().abs()
        overflows = largest >= units.largest
        product = Ball(product.mid, product.rad.masked_fill(overflows, float("inf")))
    product = product.stored(units)
    if bias is None:
        return (product,)
    # torch's own linear layer stores the product first if its input is not dense. Then rad += r
    # |b|.
    shift = bias.detach().double()
    sum_ = Ball(product.mid + shift, product.rad.add(shift.abs(), alpha=relative))
    return product, sum_.stored(units)


def weighted_distance(excess: Tensor, value: Tensor, context: Tensor) -> Tensor:
    """Return T1 = sum_j excess_j |v_j - o|, (B, H, L, d), or a bound on it.

    Errors of the weights move a context only as far as the values differ from it, since
    sum_j p_j (v_j - o) = 0. With more than `MOST_DISTANCES` terms, it returns a bound by the
    Cauchy-Schwarz inequality, in a tenth of the time: it is 1.3 times as large for normal values
    and equal weights, and up to 6 times where one key has most of the weight.

    excess: (B, H, L, S).
    value: v, (B, H, S, d).
    context: o, (B, H, L, d).

    >>> equal = torch.ones(1, 1, 2, 1)
    >>> weighted_distance(torch.ones(1, 1, 1, 2), equal, equal[:, :, :1])
    tensor([[[[0.]]]])
    """
    keys = value.shape[2]
    if value.numel() * excess.shape[2] <= MOST_DISTANCES:
        distance = (value.unsqueeze(2) - context.unsqueeze(3)).abs_()
        return (excess.unsqueeze(3) @ distance).squeeze(3)
    # sum_j e_j |v_j - o| <= sqrt(sum_j e_j sum_j e_j (v_j - o)^2), around the mean value, so that
    # little is lost in the difference of squares
    centre = value.mean(2, keepdim=True)
    v, o, total = value - centre, context - centre, excess.sum(-1, keepdim=True)
    of_values, of_context = excess @ v.square(), total * o.square()
    squares = (of_values - 2 * o * (excess @ v) + of_context).clamp(min=0.0)
    rounding = (keys + 8) * torch.finfo(value.dtype).eps * 2 * (of_values + of_context)
    return (total * (squares + rounding)).sqrt()
