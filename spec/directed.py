"""Directed tests: how far rounding may move an output along one direction, for dtypes that are
narrower than float32.

A bound on each element lets every rounding conspire in every element. A defect does conspire, over
thousands of them; roundings do not. So project the error on what a defect would do, <w, y - y*>,
and bound that projection. To first order it is a sum over the places where an implementation may
store a number x_k in the dtype,

    <w, y - y*> = sum_k g_k x_k delta_k,  |delta_k| <= u_s,  g_k = d<w, y*> / dx_k,

with all g_k from one backward pass, which `RoundingGraph.gradients` writes out. An error is
explained if

    |<w, y - y*>| <= min(lambda sd, worst) + sys + com + two
    sd^2 = sum_k n_k (u_s g_k x_k)^2       n_k: how many of the stored numbers are equal, so that they round alike
    worst = u_s sum_k |g_k x_k|
    sys = sum_k |g_k| s_k                  s_k: what else may be wrong, all of it conspiring: accumulators, exponential,
                                           numbers that underflow, a scale that is stored in the dtype
    com = sum over arrays of |sum_k g_k (fl(x_k) - x_k)|    the rounding of the exact numbers themselves
    two = sum_j W_j^2 |p_j <g_o, v_j - o>|                  second order; W_j: deviation of a log-weight

The model: roundings of numbers that differ are independent, with mean 0. Then Hoeffding's
inequality lets lambda sd be exceeded with a probability of at most 2 exp(-lambda^2 / 2), 3e-14 for
lambda = 8, and the rest is a theorem as in `mha.spec.core`. The model holds for rounding to
nearest, and for numbers that spread over many units in the last place; `com` stands for those that
do not, such as averages of values with a common offset. It fails for dtypes that truncate.

What is equal on paper may be stored in one of several forms: a score before or after its scaling,
with or without the key's bias; a weight before or after the division, and before or after the sum.
Each term takes the largest of them. The forms that `mha.spec.core` assumes not to occur are left
out here too.

Sources: Hoeffding 1963, theorem 2; Higham and Mary 2019, A new approach to probabilistic rounding
error analysis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mha.spec.rounding_graph import RoundingGraph, Uses
from mha.spec.rounding_places import Place

# Standard deviations: 2 exp(-LAMBDA^2 / 2) is the probability of a false alarm, 3e-14.
LAMBDA = 8.0
# The largest deviation of a log-weight at which the first order says enough.
LARGEST_DEVIATION = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How far rounding may move an output along a direction w; all terms are in units of <w, y>.

    size: <w, w>, the projection of the whole defect. sd, worst, systematic, common, second_order:
    sd, worst, sys, com and two of `mha.spec.directed`. deviation: max_j W_j.

    >>> part = Allowance(size=4.0, sd=0.125, worst=8.0, systematic=0.0, common=0.0, second_order=0.0, deviation=0.0)
    >>> part.threshold, part.is_informative, part.share(2.0)
    (1.0, True, (0.5, 0.25, 0.75))
    """

    size: float
    sd: float
    worst: float
    systematic: float
    common: float
    second_order: float
    deviation: float

    @property
    def threshold(self) -> float:
        """The largest |<w, y - y*>| that rounding explains."""
        return min(LAMBDA * self.sd, self.worst) + self.systematic + self.common + self.second_order

    @property
    def is_informative(self) -> bool:
        """Whether the whole defect would exceed the threshold, and the first order says enough."""
        return self.threshold < self.size and self.deviation <= LARGEST_DEVIATION

    def share(self, projection: float) -> tuple[float, float, float]:
        """Return how much of the defect <w, y - y*> amounts to, and the least and the most that
        rounding leaves.
        """
        most = self.threshold
        return (
            projection / self.size,
            (projection - most) / self.size,
            (projection + most) / self.size,
        )


def projection(graph: RoundingGraph, result: Tensor, direction: Tensor) -> float:
    """Return <w, y - y*> of a result y and a direction w, both (B, L, D), over the rows that are
    known.
    """
    error = (result.detach().double() - graph.output).masked_fill(~graph.known, 0.0)
    return float((error * direction.masked_fill(~graph.known, 0.0)).sum())


def allowance(graph: RoundingGraph, direction: Tensor) -> Allowance:
    """Return what rounding may do to the output along a direction w, (B, L, D), over the rows that
    are known.

    >>> import torch
    >>> from mha.spec import Claims, Config, Problem, Weights
    >>> from mha.spec.rounding_graph import rounding_graph
    >>> config, x = Config(d_model=8, n_heads=2), torch.linspace(-2, 2, 80).reshape(2, 5, 8).bfloat16()
    >>> graph = rounding_graph(Problem(config, Weights.random(config, 0, x.dtype), x, x, x), Claims())
    >>> allowance(graph, graph.output).is_informative, projection(graph, graph.output, graph.output)
    (True, 0.0)
    """
    w = direction.to(graph.weights).masked_fill(~graph.known, 0.0)
    gradients, variance = graph.gradients(w), graph.variance
    g_s = gradients["score"][0][0]
    return explained(
        graph.places,
        gradients,
        size=float(w.double().square().sum()),
        store=graph.store,
        # A scale is one number: its error moves all scores at once.
        of_scale=graph.tau_error * abs(float((g_s * graph.scores).sum())),
        second_order=float((g_s.abs() * variance).sum()),
        deviation=math.sqrt(float(variance.max())) if variance.numel() else 0.0,
    )


def allowances(graph: RoundingGraph, directions: Iterable[Tensor]) -> list[Allowance]:
    """Return `allowance` for each of several directions, in float32: thresholds to four digits, in
    half the time.
    """
    narrow = graph.narrowed()
    return [allowance(narrow, direction) for direction in directions]


def explained(  # noqa: PLR0913  the terms, by name
    places: Mapping[str, Place],
    gradients: Mapping[str, Uses],
    *,
    size: float,
    store: float,
    of_scale: float,
    second_order: float,
    deviation: float,
) -> Allowance:
    """Return the allowance of places and of d<w, y*> / dx for each; of_scale: the part of sys that
    a scale makes.

    Uses of a number may round together or on their own, so their deviations are added up, not their
    squares.
    """
    # Places with the same gradients, such as stored exponentials and weights, are looked at
    # together.
    together: dict[int, list[str]] = {}
    for name in places:
        together.setdefault(id(gradients[name]), []).append(name)
    square = worst = systematic = common = 0.0
    for names in together.values():
        members = [places[name] for name in names]
        by_use = [_sums(forms, members) for forms in gradients[names[0]]]
        for place, sums in zip(members, zip(*by_use, strict=True), strict=True):
            squares, sizes, own, *moves = zip(*sums, strict=True)
            square += sum(map(math.sqrt, squares)) ** 2
            worst, systematic = worst + sum(sizes), systematic + sum(own)
            common += sum(
                times * sum(moved) for (times, _), moved in zip(place.moves, moves, strict=True)
            )
    return Allowance(
        size=size,
        sd=store * math.sqrt(square),
        worst=store * worst,
        systematic=systematic + of_scale,
        common=common,
        second_order=second_order,
        deviation=deviation,
    )


def _sums(forms: Sequence[Tensor], places: Sequence[Place]) -> list[list[float]]:
    """Return the sums over one use of the numbers of each place; see `Place.sums`."""
    g = torch.stack(tuple(forms)) if len(forms) > 1 else forms[0].unsqueeze(0)
    sizes, squares = g.abs(), g.square()
    return [place.sums(g, sizes, squares) for place in places]
