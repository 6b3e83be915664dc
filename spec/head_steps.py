"""The norm and the rotation of queries and keys in float64, forward and backward, with bounds.

Symbols beside those of `mha.spec.core`, for the n numbers x that a norm is over:

    c, r            x, or x less its mean; sqrt(mean(c^2) + eps)
    g, y            the weight of a column, and g c / r
    u_a, u_s        those of the dtype, but of float32 at least (`Rounding.heads_in_float32`)

The norm. That r is a norm moves it by at most rms(dx) where x is off by dx, and r >= sqrt(eps), so
that with r- = max(r - rms(dx), sqrt(eps))

    |c~ / r~ - c / r| <= (dc + |c / r| rms(dx)) / r-

is exact, not first order. What its own steps add is relative. mean(c^2) is off by
rho = 3 gamma(n + 3) mean(x^2) / r-^2 (+) 4 u_s, which covers the difference mean(x^2) - mean(x)^2,
squares and means that are stored, and the eps; 1 / r by 1 / sqrt(1 - rho) - 1; then the quotient,
1 + g, and two products are rounded, and stored. For a norm of kind "l2", sums stand for the means
of squares and products everywhere, and rms(dx) is the length of dx. For "unit_rms", 1 / r is the
product of two numbers that are rounded, and stored, and what underflows before the product with
the root of the width is multiplied by that.

Backward. With h = c / r and the gradient dy of y,

    dx = (g dy - h mean(g dy h) [- mean(g dy)]) / r    dg = sum dy h

and each term may be stored up to `STEPS` times on its way.

Sources: Zhang and Sennrich 2019; Ba et al. 2016; Higham, Accuracy and Stability of Numerical
Algorithms, 2nd ed., 2002, chapter 3. `mha.spec.rotation` has the rotation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mha.spec.bounds import Ball
from mha.spec.claims import Claims
from mha.spec.problem import Problem
from mha.spec.rotary import QkNorm
from mha.spec.rotation import Rotation, Sized
from mha.spec.rounding import Rounding
from mha.spec.units import Units, units_of

# The norms by a length that has a least value.
CLAMPED = ("l2", "unit_rms")
# How often a term of a gradient of a norm may be stored: autograd takes each operation on its own.
STEPS = 10


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """The norm of heads (B, heads, length, d_k).

    weight: g, broadcastable to the heads, in float64, or None.
    eps: what is added to the mean of squares.
    units: of the dtype, or coarser.
    """

    norm: QkNorm
    weight: Tensor | None
    eps: float
    units: Units

    @staticmethod
    def of(norm: QkNorm, weight: Tensor | None, head_dim: int, eps: float, units: Units) -> Norm:
        """Return the norm with a weight of a head, (d_k,), or of all heads, or with none.

        >>> norm = Norm.of(QkNorm(eps=1e-9), None, 2, 1e-9, units_of(torch.float32))
        >>> norm.forward(Ball.exact(torch.tensor([[[[3.0, 3.0]]]]))).mid.flatten()
        tensor([1.0000, 1.0000], dtype=torch.float64)
        """
        if weight is not None:
            weight = weight.detach().double()
            if norm.weight == "offset":
                weight = 1 + weight
            weight = weight.view(-1, 1, head_dim)
        return Norm(norm, weight, eps, units)

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of heads that it is over."""
        if self.norm.over == "width":
            return -3, -1
        return (-1,)

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean over the axes, which are kept."""
        return x.mean(self.axes, keepdim=True)

    def total(self, x: Tensor) -> Tensor:
        """Return what squares, or products, are made one number by: their mean, or their sum."""
        if self.norm.kind == "l2":
            return x.sum(self.axes, keepdim=True)
        return self.mean(x)

    def variance_of_total(self, x: Tensor) -> Tensor:
        """Return the variance of the total of numbers that have these variances."""
        if self.norm.kind == "l2":
            return self.total(x)
        return self.mean(x) / self.terms(x)

    def terms(self, x: Tensor) -> int:
        """Return how many numbers it is over."""
        return math.prod(x.shape[axis] for axis in self.axes)

    def _scale(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return x
        return self.weight.to(x) * x

    def root(self, x: Tensor) -> Tensor:
        """Return r of exact numbers."""
        total = self.total(self.centred(x).square())
        if self.norm.kind in CLAMPED:
            return total.clamp(min=self._least(x)).sqrt()
        return (total + self.eps).sqrt()

    def _least(self, x: Tensor) -> float:
        """Return the least square of r."""
        if self.norm.kind == "unit_rms":
            return self.eps / self.terms(x)
        return self.eps

    def _underflow(self, x: Tensor) -> float:
        """Return what may underflow before the product with the root of the width multiplies it."""
        if self.norm.kind != "unit_rms":
            return 0.0
        return math.sqrt(self.terms(x)) * (self.units.subnormal + self.units.flush)

    def follows(self, x: Tensor) -> Tensor | float:
        """Return 1 where r changes with the numbers, and 0 where it is the least length, which does
        not.
        """
        if self.norm.kind in CLAMPED:
            return (self.total(x.square()) > self._least(x)).to(x)
        return 1.0

    def centred(self, x: Tensor) -> Tensor:
        """Return c of exact numbers."""
        if self.norm.kind == "layer":
            return x - self.mean(x)
        return x

    def unit(self, x: Ball) -> tuple[Ball, Tensor, Tensor]:
        """Return h = c / r before it is stored, r-, and the relative error of 1 / r.

        The error of h has those of x and of r.
        """
        units, terms = self.units, self.terms(x.mid)
        c, r = self.centred(x.mid), self.root(x.mid)
        moved = self.total(x.rad.square()).sqrt()
        least = torch.maximum(r - moved, r.new_tensor(math.sqrt(self._least(x.mid))))
        least = least * (1 - 2**-40)
        d_c = x.rad
        if self.norm.kind == "layer":
            # The mean, the difference, and both of them divided apart
            size = x.size + self.mean(x.size)
            of_mean = (units.gamma(terms + 3) + units.store) * self.mean(x.size)
            d_c = x.rad + self.mean(x.rad) + of_mean + 4 * units.accumulate * size
            d_c = d_c + units.store * (c.abs() + x.rad) + units.subnormal
        lost = units.subnormal + units.flush
        # rho = 3 gamma(n + 3) mean(x^2) / r-^2 (+) 4 u_s, and what underflows
        ratio = self.total(x.size.square()) / least.square()
        rho = 3 * units.gamma(terms + 3) * ratio + 4 * units.store * (1 + units.store) ** 3
        rho = rho + 2 * lost / least.square()
        if units.largest < float("inf"):  # squares may be stored
            overflows = (x.size.square() >= units.largest).any(self.axes[-1], keepdim=True)
            if len(self.axes) > 1:
                overflows = overflows.any(self.axes[0], keepdim=True)
            rho = rho.masked_fill(overflows, 1.0)
        inverse = (1 - rho).clamp(min=0.0).rsqrt() - 1
        # the root, its inverse or the division, each stored
        stores = 2
        if self.norm.kind == "unit_rms":  # and the product with the root of the width
            stores += 1
        inverse = inverse + (inverse + 1) * (stores * units.store + 8 * units.accumulate)
        h = c / r
        rad = (d_c + h.abs() * moved) / least
        rad = rad + inverse.nan_to_num(nan=float("inf")) * (h.abs() + rad)
        rad = rad + self._underflow(x.mid)
        # A number of 0 in a row that may overflow is not known either.
        return Ball(h, rad.nan_to_num(nan=float("inf"), posinf=float("inf"))), least, inverse

    def forward(self, x: Ball) -> Ball:
        """Return the normed heads, stored."""
        units = self.units
        h, _, _ = self.unit(x)
        h = h.stored(units)
        if self.weight is None:
            return h
        # 1 + g may be stored, and the product is
        size = self.weight.abs() * h.size
        rad = self.weight.abs() * h.rad + (units.store + 2 * units.accumulate) * size
        if self.norm.weight == "offset":
            rad = rad + units.subnormal * h.size
        rad = rad + units.flush + self._underflow(x.mid)
        return Ball(self.weight * h.mid, rad).stored(units)

    def exact(self, x: Tensor) -> Tensor:
        """Return normed numbers in float64."""
        return self._scale(self.centred(x) / self.root(x))

    def pulled_back_to_centred(self, x: Tensor, d_y: Tensor) -> Tensor:
        """Return dc of exact numbers x and dy."""
        scaled, r = self._scale(d_y), self.root(x).to(d_y)
        h = self.centred(x).to(d_y) / r
        return (scaled - h * self.follows(x) * self.total(scaled * h)) / r

    def pulled_back(self, x: Tensor, d_y: Tensor) -> Tensor:
        """Return dx of exact numbers x and dy."""
        return self.centred(self.pulled_back_to_centred(x, d_y))

    def backward(self, x: Ball, d_y: Sized) -> tuple[Sized, Sized]:
        """Return the gradients of the numbers x that were normed, and dy h, that of each weight."""
        units, terms = self.units, self.terms(x.mid)
        h, least, inverse = self.unit(x)
        steps = (1 + units.store) ** STEPS - 1
        gamma, lost = units.gamma(terms + 4), 4 * (units.subnormal + units.flush)
        weight = h.mid.new_ones(()) if self.weight is None else self.weight
        d_h = Ball(weight * d_y.ball.mid, weight.abs() * d_y.ball.rad)
        size = weight.abs() * torch.maximum(d_y.size, d_y.ball.size)
        # p = dy h:  rad p = rad dy (|h| + rad h) + |dy| rad h
        p = Ball(d_h.mid * h.mid, d_h.rad * h.size + d_h.mid.abs() * h.rad)
        of_mean, mean_size = self.total(p.mid), self.total(size * h.size)
        rad_mean = self.total(p.rad) + (gamma + steps) * mean_size + lost
        follows = self.follows(x.mid)
        back = d_h.mid - follows * h.mid * of_mean
        rad = d_h.rad + h.rad * (of_mean.abs() + rad_mean) + h.mid.abs() * rad_mean
        sizes = size + h.size * mean_size
        if self.norm.kind == "layer":
            # - mean(dy), and the form a x + b of the rest, in which x is not less its mean
            back = back - self.mean(back)
            rad = rad + self.mean(rad) + gamma * self.mean(sizes)
            spread = (x.size + self.mean(x.size)) / least
            rad = rad + 4 * gamma * spread * self.mean(size * spread)
            sizes = sizes + self.mean(sizes)
        r = self.root(x.mid)
        moved = (r / least - 1) * (1 + inverse) + inverse
        rad = (rad + steps * sizes + lost) / least * (1 + inverse) + moved * back.abs() / r
        rad = rad.nan_to_num(nan=float("inf"), posinf=float("inf"))
        d_x = Ball(back / r, rad).stored(units)
        of_weight = Ball(d_y.ball.mid * h.mid, d_y.ball.rad * h.size + d_y.ball.mid.abs() * h.rad)
        weighed = torch.maximum(d_y.size, d_y.ball.size) * h.size
        of_weight = Ball(of_weight.mid, of_weight.rad + steps * weighed + lost)
        return Sized(d_x, torch.maximum(sizes / least, d_x.size)), Sized(of_weight, weighed)


Step = Norm | Rotation


@dataclass(frozen=True, slots=True, eq=False)
class Passed:
    """Queries or keys on their way from the projection to the scores.

    before: what each step gets, (B, heads, length, d_k); a key/value head is there once.
    after: what the scores get.
    """

    steps: Sequence[Step]
    before: Sequence[Ball]
    after: Ball

    @staticmethod
    def through(steps: Sequence[Step], heads: Ball) -> Passed:
        """Take projected heads through the steps."""
        before = list[Ball]()
        for step in steps:
            before.append(heads)
            heads = step.forward(heads)
        return Passed(steps, before, heads)

    def backward(self, d_y: Sized) -> tuple[Sized, Sized | None]:
        """Return the gradient of projected heads, and that of each weight of a norm, or None."""
        of_weight = None
        for step, before in zip(reversed(self.steps), reversed(self.before), strict=True):
            if isinstance(step, Norm):
                d_y, of_weight = step.backward(before, d_y)
            else:
                d_y = step.backward(d_y)
        return d_y, of_weight


def steps_of(problem: Problem, claims: Claims, role: str, dtype: torch.dtype) -> list[Step]:
    """Return what queries or keys ("q", "k") go through in a dtype, in order."""
    config = problem.config
    if not claims.changes_heads or role not in "qk":
        return []
    units, steps = units_of_heads(dtype, claims.rounding), list[Step]()
    if claims.rotary:
        length = (problem.query if role == "q" else problem.key).shape[1]
        positions = torch.arange(length, device=problem.query.device)
        if role == "q" and problem.places is not None:
            positions = problem.places
        steps.append(Rotation.of(claims.rotary, positions, config.head_dim, units))
    if claims.qk_norm:
        weight = getattr(problem.weights, f"{role}_norm")
        eps = claims.qk_norm.eps_for(dtype)
        norm = Norm.of(claims.qk_norm, weight, config.head_dim, eps, units)
        steps.insert(0 if claims.qk_norm.before_rotary else len(steps), norm)
    return steps


def units_of_heads(dtype: torch.dtype, rounding: Rounding) -> Units:
    """Return the roundoffs of the steps in a dtype: those of float32 at least, if declared."""
    units = units_of(dtype, rounding)
    return units.coarser(units_of(torch.float32)) if rounding.heads_in_float32 else units


def weight_of_norm(found: Sized, step: Norm, like: Tensor, units: Units) -> Ball:
    """Return the gradient of the weight of a norm, summed over all rows and, of heads, over these.

    found: dy h of each number, (B, heads, length, d_k).
    """
    batch, heads, length, _ = found.size.shape
    axes: tuple[int, ...] = (0, 2)
    terms = batch * length
    if step.norm.over == "head":
        terms, axes = terms * heads, (0, 1, 2)
    # partial sums of each item and head may be stored
    relative = units.partial_sums(terms + 2, batch * heads)
    lost = terms * units.flush + batch * heads * units.subnormal
    rad = (found.ball.rad + relative * found.size).sum(axes) + lost
    mid = found.ball.mid.sum(axes)
    return Ball(mid.reshape(like.shape), rad.reshape(like.shape)).stored(units)
