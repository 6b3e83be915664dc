"""Directed tests: how far rounding may move an output along one direction, in half precision.

A bound on each element lets every rounding conspire in every element. A defect does conspire, over
thousands of them; roundings do not. So project the error on what a defect would do, <w, y - y*>,
and bound that projection. To first order it is a sum over the places where an implementation may
store a number x_k in the dtype,

    <w, y - y*> = sum_k g_k x_k delta_k,  |delta_k| <= u_s,  g_k = d<w, y*> / dx_k,

with all g_k from one backward pass, which `RoundingGraph.gradients` writes out. An error is
explained if

    |<w, y - y*>| <= min(lambda sd, worst) + sys + com + two
    sd^2 = sum_k n_k (u_s g_k x_k)^2
    worst = u_s sum_k |g_k x_k|
    sys = sum_k |g_k| s_k
    com = sum over arrays of |sum_k g_k (fl(x_k) - x_k)|
    two = sum_j W_j^2 |p_j <g_o, v_j - o>|

    n_k   how many of the stored numbers are equal, so that they round alike
    s_k   what else may be wrong, all of it conspiring: accumulators, exponential, numbers that
          underflow, a scale that is stored in the dtype
    W_j   deviation of a log-weight; `two` is the second order

`com` is the rounding of the exact numbers themselves.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mha.spec.rounding_graph import RoundingGraph, Uses
from mha.spec.rounding_places import Place, Sums

# Standard deviations: 2 exp(-LAMBDA^2 / 2) is the probability of a false alarm, 3e-14.
LAMBDA = 8.0
# The largest deviation of a log-weight at which the first order says enough.
LARGEST_DEVIATION = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How far rounding may move an output along a direction w; all terms are in units of <w, y>.

    size: <w, w>, the projection of the whole defect.
    sd, worst, systematic, common, second_order: sd, worst, sys, com and two of
        `mha.spec.directed`.
    deviation: max_j W_j.

    >>> terms = {"systematic": 0.0, "common": 0.0, "second_order": 0.0, "deviation": 0.0}
    >>> part = Allowance(size=4.0, sd=0.125, worst=8.0, **terms)
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
        """Return how much of the defect <w, y - y*> amounts to, and the least and the most of it.

        The last two are what rounding leaves possible.
        """
        found, most, whole = projection, self.threshold, self.size
        return found / whole, (found - most) / whole, (found + most) / whole


def projection(graph: RoundingGraph, result: Tensor, direction: Tensor) -> float:
    """Return <w, y - y*> over the rows that are known.

    result: y, (B, L, D).
    direction: w, (B, L, D).
    """
    error = (result.detach().double() - graph.output).masked_fill(~graph.known, 0.0)
    return float((error * direction.masked_fill(~graph.known, 0.0)).sum())


def allowance(graph: RoundingGraph, direction: Tensor) -> Allowance:
    """Return what rounding may do to the output over the rows that are known.

    direction: w, (B, L, D).

    >>> import torch
    >>> from mha.spec import Claims, Config, Problem, Weights
    >>> from mha.spec.rounding_graph import rounding_graph
    >>> config = Config(d_model=8, n_heads=2)
    >>> x = torch.linspace(-2, 2, 80).reshape(2, 5, 8).bfloat16()
    >>> problem = Problem(config, Weights.random(config, 0, x.dtype), x, x, x)
    >>> graph = rounding_graph(problem, Claims())
    >>> allowance(graph, graph.output).is_informative
    True
    >>> projection(graph, graph.output, graph.output)
    0.0
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
        deviation=largest_deviation(variance),
    )


def allowances(graph: RoundingGraph, directions: Iterable[Tensor]) -> list[Allowance]:
    """Return `allowance` for each of several directions, in float32.

    Thresholds have four digits then, and take half the time.
    """
    narrow = graph.narrowed()
    return [allowance(narrow, direction) for direction in directions]


def largest_deviation(variance: Tensor) -> float:
    """Return max_j W_j, for W^2 of every score, (B, H, L, S)."""
    return math.sqrt(float(variance.max())) if variance.numel() else 0.0


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
    """Return the allowance of places.

    gradients: d<w, y*> / dx for each place.
    store: u_s.
    of_scale: the part of sys that a scale makes.
    size, second_order, deviation: as in `Allowance`.
    """
    square = worst = systematic = common = 0.0
    for members, uses in _with_equal_gradients(places, gradients):
        by_use = [_sums(forms, members) for forms in uses]
        for number, place in enumerate(members):
            sums = [of_members[number] for of_members in by_use]
            # Uses of a number may round together or on their own, so their deviations are added
            # up, not their squares.
            squares, sizes, own, _ = zip(*sums, strict=True)
            square += sum(map(math.sqrt, squares)) ** 2
            worst += sum(sizes)
            systematic += sum(own)
            common += _common(place, sums)
    return Allowance(
        size=size,
        sd=store * math.sqrt(square),
        worst=store * worst,
        systematic=systematic + of_scale,
        common=common,
        second_order=second_order,
        deviation=deviation,
    )


def _with_equal_gradients(
    places: Mapping[str, Place], gradients: Mapping[str, Uses]
) -> Iterator[tuple[list[Place], Uses]]:
    """Yield the places in groups that have the same gradients, such as exponentials and weights.

    What is made of the gradients is then made once.
    """
    groups: dict[int, list[str]] = {}
    for name in places:
        groups.setdefault(id(gradients[name]), []).append(name)
    for names in groups.values():
        yield [places[name] for name in names], gradients[names[0]]


def _common(place: Place, sums: Sequence[Sums]) -> float:
    """Return com of a place: over its stores, and for each the sum over its uses."""
    common = 0.0
    for number, (times, _) in enumerate(place.moves):
        common += times * sum(use.moves[number] for use in sums)
    return common


def _sums(forms: Sequence[Tensor], places: Sequence[Place]) -> list[Sums]:
    """Return the sums over one use of the numbers of each place."""
    g = torch.stack(tuple(forms)) if len(forms) > 1 else forms[0].unsqueeze(0)
    sizes, squares = g.abs(), g.square()
    return [place.sums(g, sizes, squares) for place in places]
