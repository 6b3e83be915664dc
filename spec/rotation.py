"""The rotation of queries and keys by their positions in float64, with a bound on its rounding.

Symbols beside those of `mha.spec.core`, for one pair (a, b) of columns at position i:

    f, i f          the frequency of the pair, base^(-2m/r) / factor, and its angle
    t               error of a cosine or a sine
    u, u_s          those of the dtype, but of float32 at least (`Rounding.heads_in_float32`)

An angle is off by (2 ln(base) 2m/r + 6) u, or 0 for m = 0, whose frequency is 1: two
roundings of the exponent, the power by 2 ulp, its inverse, the product with the position. A factor
adds 2 u: its inverse, and a product. A base that is stretched by s^(r/(r-2)) is off by
(2 ln(s) r/(r-2) + 6) u itself, and the angle by 2m/r of that. Cosines
and sines have two units more, and may be stored: t = angle error + 4 u + u_s. Then
(a cos - b sin, b cos + a sin) has two products and a sum, each of which may be stored.

Gradients are turned back. Assumptions: positions are exact; angles are not made by adding up, nor
rotations by multiplying up. Sources: Su et al. 2021, section 3.2; Higham, Accuracy and Stability of
Numerical Algorithms, 2nd ed., 2002, chapter 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mha.spec.bounds import Ball
from mha.spec.rotary import Rotary
from mha.spec.units import Units, compounded


@dataclass(frozen=True, slots=True, eq=False)
class Sized:
    """A gradient of heads (B, heads, length, d_k).

    size: the sum of the magnitudes of its parts, to which rounding is relative where they are added
        up later.
    """

    ball: Ball
    size: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The rotation of heads at some positions.

    cosines, sines: (length, r), of each column.
    error: t, of each column.
    units: of the dtype, or coarser.
    """

    rotary: Rotary
    cosines: Tensor
    sines: Tensor
    error: Tensor
    units: Units

    @staticmethod
    def of(rotary: Rotary, positions: Tensor, head_dim: int, units: Units) -> Rotation:
        """Return the rotation at positions (length,) in float64.

        >>> from mha.spec.units import units_of
        >>> one = Rotation.of(Rotary(), torch.ones(1).double(), 2, units_of(torch.float32))
        >>> one.forward(Ball.exact(torch.tensor([[1.0, 0.0]]))).mid
        tensor([[0.5403, 0.8415]], dtype=torch.float64)
        """
        width = rotary.width(head_dim)
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
        log_base = math.log(rotary.base_for(head_dim))
        frequencies = (-log_base * exponents).exp() / rotary.factor
        angles = positions.double().unsqueeze(-1) * frequencies
        u = units.accumulate
        # t = |angle| (2 ln(base) 2m/r + 6) [m > 0] u + 4 u (+) u_s
        of_angles = (2 * log_base * exponents + 6) * (exponents > 0)
        if rotary.factor != 1:
            of_angles = of_angles + 2
        if rotary.stretch != 1:
            of_base = 2 * abs(log_base - math.log(rotary.base)) + 6
            of_angles = of_angles + of_base * exponents
        error = angles * of_angles * u + 4 * u + units.store

        sign = 1.0 if rotary.direction == "forward" else -1.0
        numbers = angles.cos(), sign * angles.sin(), error
        cosines, sines, of_columns = (_of_columns(x, rotary) for x in numbers)
        return Rotation(rotary, cosines, sines, of_columns, units)

    def forward(self, x: Ball) -> Ball:
        """Return the rotated heads, stored."""
        return self._turned(x, self.sines)

    def backward(self, d_y: Sized) -> Sized:
        """Return the gradient of what was rotated."""
        turned = self._turned(d_y.ball, -self.sines)
        sizes = self._rotated(d_y.size, self.cosines.abs(), self.sines.abs(), absolute=True)
        return Sized(turned, torch.maximum(sizes, turned.size))

    def exact(self, x: Tensor, *, back: bool = False) -> Tensor:
        """Return rotated numbers in float64, or numbers that are rotated back."""
        sines = -self.sines if back else self.sines
        return self._rotated(x, self.cosines.to(x), sines.to(x))

    def squares(self, x: Tensor) -> Tensor:
        """Return the variances of rotated numbers whose variances are x."""
        cosines, sines = self.cosines.to(x), self.sines.to(x)
        return self._rotated(x, cosines.square(), sines.square(), absolute=True)

    def by_pairs(self, x: Tensor, *, halved: bool = False) -> Tensor:
        """Return the sums of numbers (length, r) over the columns of each pair; half, if asked."""
        if self.rotary.pairs == "half":
            first, second = x.chunk(2, -1)
        else:
            first, second = x[..., 0::2], x[..., 1::2]
        total: Tensor = first + second
        return total / 2 if halved else total

    def others(self, x: Tensor) -> Tensor:
        """Return what sines are multiplied by, for the r columns that are rotated."""
        return self._rotated(x, torch.zeros_like(x), torch.ones_like(x))

    def span(self, x: Tensor) -> Tensor:
        """Return |a cos| + |b sin|, and the columns that stay."""
        return self._rotated(x.abs(), self.cosines.abs(), self.sines.abs(), absolute=True)

    def on_heads(self, of_cosines: Tensor | float, of_sines: Tensor | float, x: Tensor) -> Tensor:
        """Return x times numbers of the cosines, and the others of x times those of the sines.

        of_cosines, of_sines: (length, r / 2).
        """
        columns = [
            _of_columns(torch.as_tensor(each).to(x), self.rotary) for each in (of_cosines, of_sines)
        ]
        moved = self._rotated(x, columns[0], columns[1], absolute=True)
        return moved.index_fill(-1, torch.arange(columns[0].shape[-1], x.shape[-1]), 0.0)

    def _turned(self, x: Ball, sines: Tensor) -> Ball:
        units, cosines = self.units, self.cosines
        size = self._rotated(
            x.size, cosines.abs() + self.error, sines.abs() + self.error, absolute=True
        )
        # rad = R rad x + t (|a| + |b|) + (2 u_a (+) u_s) (|a cos| + |b sin|), then stored
        moved = self._rotated(x.rad, cosines.abs(), sines.abs(), absolute=True)
        of_tables = self._rotated(x.size, self.error, self.error, absolute=True)
        kept = x.size.clone()
        kept[..., : cosines.shape[-1]] = 0.0
        of_tables = of_tables - kept
        relative = compounded(3 * units.accumulate, units.store)
        rad = moved + of_tables + relative * size + 2 * (units.flush + units.subnormal)
        return Ball(self._rotated(x.mid, cosines, sines), rad).stored(units)

    def _rotated(
        self, x: Tensor, cosines: Tensor, sines: Tensor, *, absolute: bool = False
    ) -> Tensor:
        """Return x cos + (the other of each pair) sin; the columns after the r first ones stay.

        absolute: the other of each pair has no sign.
        """
        width = cosines.shape[-1]
        turned, kept = x[..., :width], x[..., width:]
        sign = 1.0 if absolute else -1.0
        if self.rotary.pairs == "half":
            first, second = turned.chunk(2, -1)
            other = torch.cat([sign * second, first], -1)
        else:
            first, second = turned[..., 0::2], turned[..., 1::2]
            other = torch.stack([sign * second, first], -1).flatten(-2)
        return torch.cat([turned * cosines + other * sines, kept], -1)


def _of_columns(x: Tensor, rotary: Rotary) -> Tensor:
    """Return (length, r) of (length, r / 2): each number is of both columns of a pair."""
    if rotary.pairs == "half":
        return torch.cat([x, x], -1)
    return x.repeat_interleave(2, -1)
