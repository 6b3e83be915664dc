"""The gradients of projections: of inputs, weights and biases, each number with its error bound.

From the gradient dY of a projection's result, Y = x W^T + b,

    dW = dY^T x    db = sum dY    dx = dY W.

The symbols are those of `mha.spec.core`; rad X is the error of X.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mha.spec.bounds import Ball
from mha.spec.head_steps import Norm, Passed, units_of_heads, weight_of_norm
from mha.spec.heads import Precision, side_by_side
from mha.spec.problem import INPUTS, Problem
from mha.spec.rotation import Sized
from mha.spec.rounding import Rounding
from mha.spec.units import Units


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """The gradient of the result of a projection, (B, length, m).

    size: the sum of the magnitudes of its parts, to which rounding is relative where they are added
        up later.
    """

    ball: Ball
    size: Tensor

    def __getitem__(self, index: tuple[slice, ...]) -> Partial:
        return Partial(self.ball[index], self.size[index])

    def rows(self) -> tuple[Ball, Tensor]:
        """Return numbers and sizes of all rows of the batch, (B * length, m)."""
        return self.ball.flatten(0, 1), self.size.flatten(0, 1)


def gradients_of_projection(
    problem: Problem, name: str, part: Partial, allowed: Tensor, precision: Precision
) -> dict[str, Ball]:
    """Return the gradients of an input, of its projection, and of an extra key or value, by name.

    name: of the input.
    part: dQ, dK or dV, heads side by side, extra keys after those of the input.
    allowed: boolean (B, H, L, S), with the extra keys.
    """
    config, role, source = problem.config, name[0], getattr(problem, name)
    repeats = 1 if name == "query" else config.n_heads // config.kv_heads
    units, found = precision.units, dict[str, Ball]()
    batch, _, queries, keys = problem.shape
    has_extra_keys = part.size.shape[1] > source.shape[1]
    if has_extra_keys:
        if config.bias_kv:
            extra = part[:, keys : keys + 1]
            stored = batch * repeats
            terms = batch * queries + stored
            found[f"extra_{role}"] = _bias_gradient(extra, terms, stored, units)
        part = part[:, :keys]
    # Exactly 0 for a query without keys, and for a key that no query may attend to.
    others = 2 if name == "query" else 1
    unused = ~allowed.any(1).any(others)[:, : source.shape[1], None]
    if not config.projected:
        return {name: Ball(part.ball.mid, part.ball.rad.masked_fill(unused, 0.0))}
    # dW = dX^T x, db = sum dX, partial sums for each item, repeat and rank
    pieces = batch * repeats * precision.rounding.ranks + precision.rounding.reductions
    of_weights = weight_gradients(part, Ball.exact(source), pieces, units)
    found[f"w_{role}"], found[f"b_{role}"] = of_weights
    # dx = dX W. One product may hold all projections of one tensor, and autograd may add them up
    # head by head.
    sharing = sum(getattr(problem, other) is source for other in INPUTS)
    terms = sharing * (max(config.inner_width, config.context_width) + config.n_heads)
    pieces = sharing * config.n_heads + precision.rounding.reductions
    gradient = input_gradient(part, getattr(problem.weights, f"w_{role}"), terms, pieces, units)
    return found | {name: Ball(gradient.mid, gradient.rad.masked_fill(unused, 0.0))}


def input_gradient(d_y: Partial, weight: Tensor, terms: int, pieces: int, units: Units) -> Ball:
    """Return dx = dy W, (..., n), the gradient of a projection's input, for W (m, n).

    terms: how many are added up.
    pieces: how many partial sums are stored.
    """
    # rad dx = (rad dy + r size) |W| + terms eta_a + pieces eta_s, where r is the error of the sum
    matrix = weight.detach().double()
    relative = units.partial_sums(terms, pieces)
    spread = d_y.ball.rad + relative * d_y.size
    rad = spread @ matrix.abs() + terms * units.flush + pieces * units.subnormal
    return Ball(d_y.ball.mid @ matrix, rad).stored(units)


def weight_gradients(d_y: Partial, x: Ball, pieces: int, units: Units) -> tuple[Ball, Ball]:
    """Return dW = dy^T x, (m, n), and db = sum dy, (m,), of a projection; sums over B * length.

    x: the input of the projection, (B, length, n).
    pieces: how many partial sums are stored.
    """
    (ball, size), x = d_y.rows(), x.flatten(0, 1)
    # rad dW = |dy|^T rad x + (rad dy + r size)^T (|x| + rad x) + t eta_a + pieces eta_s, for t
    # terms
    terms = ball.mid.shape[0] + pieces
    relative = units.partial_sums(terms, pieces)
    spread, lost = (ball.rad + relative * size).mT, terms * units.flush + pieces * units.subnormal
    matrix = Ball(ball.mid.mT @ x.mid, ball.mid.mT.abs() @ x.rad + spread @ x.size + lost)
    return matrix.stored(units), Ball(ball.mid.sum(0), spread.sum(-1) + lost).stored(units)


def _bias_gradient(d_y: Partial, terms: int, pieces: int, units: Units) -> Ball:
    """Return the sum of (B, length, m) over B * length.

    terms: how many are added up.
    pieces: how many partial sums are stored.
    """
    ball, size = d_y.rows()
    relative = units.partial_sums(terms, pieces)
    lost = terms * units.flush + pieces * units.subnormal
    return Ball(ball.mid.sum(0), (ball.rad + relative * size).sum(0) + lost).stored(units)


def through_steps(
    problem: Problem, name: str, part: Partial, passed: Passed, rounding: Rounding
) -> tuple[Partial, dict[str, Ball]]:
    """Return the gradient of what was projected, and that of the weight of a norm, by name.

    name: of the input.
    part: the gradient of normed and rotated heads, side by side; what no input has, as the key of
        a sink, comes last, and passes through no step.
    """
    width, length = problem.config.head_dim, getattr(problem, name).shape[1]
    rest, part = part[:, length:], part[:, :length]

    def split(x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, width)).transpose(1, 2)
        return heads

    given = Sized(part.ball.rearranged(split), split(part.size))
    d_x, of_weight = passed.backward(given)
    ball = Ball.joined([d_x.ball.rearranged(side_by_side), rest.ball], 1)
    back = Partial(ball, torch.cat([side_by_side(d_x.size), rest.size], 1))
    found, weight = dict[str, Ball](), getattr(problem.weights, f"{name[0]}_norm")
    if of_weight is not None and weight is not None:
        norm = next(step for step in passed.steps if isinstance(step, Norm))
        units = units_of_heads(problem.query.dtype, rounding)
        found[f"{name[0]}_norm"] = weight_of_norm(of_weight, norm, weight, units)
    return back, found


def joined_heads(heads: Ball, repeats: int, units: Units) -> Partial:
    """Add up the repeats of each key/value head, (B, H, length, d_k), and lay heads side by side.

    The result is (B, length, heads * d_k).
    """
    size = heads.size
    if repeats > 1:
        # rad += repeats u_s sum (|x| + rad x) + eta_s
        size = size.unflatten(1, (-1, repeats)).sum(2)
        heads = heads.rearranged(lambda part: part.unflatten(1, (-1, repeats)).sum(2))
        heads = Ball(heads.mid, heads.rad + repeats * units.store * size + units.subnormal)
    return Partial(heads.rearranged(side_by_side), side_by_side(size))
