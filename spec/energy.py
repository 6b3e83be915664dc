"""The energy of an output's error: how large sum_i (y_i - y*_i)^2 may be, in half precision.

A bound on each element, and a projection on what a defect would do, both miss errors without a
direction: sums that are kept in half precision, key by key, are no larger in any element than the
worst case, and point nowhere. Their energy is larger than that of the roundings which a profile
has. To first order the error is sum_k J_k e_k over the places of `mha.spec.rounding_graph`, J_k =
dy* / dx_k. With independent e_k of mean 0 and sub-Gaussian variance s_k^2,

    |y - y*|^2 <= M + 2 sqrt(F t) + 2 S t   with a probability of at least 1 - exp(-t),

M = tr C, F = tr C^2, S = |C|, C = sum_k s_k^2 J_k J_k^T. The model: a stored number is off by an
error that is uniform within half a unit in its last place, h_k, so that s_k^2 = n_k h_k^2 / 3, with
n_k as in `mha.spec.directed`; what else is wrong with a number is at most its bound s, taken for
its deviation. Nothing is tuned.

With random signs w, M is the mean of w^T C w and F that of (w^T C v)^2, where w^T C v = sum_k s_k^2
<w, J_k> <v, J_k> takes the backward passes of w and v. Items share no number, so that C has a block
for each, and S is at most the root of the largest block's F. The errors of these estimates are
small beside the deviation that is allowed for.

A scale that is stored and the mean of the second order have a direction, and are added as such;
what else the second order adds is at most W of the first, W the largest deviation of a log-weight.

Sources: Hsu, Kakade and Zhang 2012, A tail inequality for quadratic forms of subgaussian random
vectors, theorem 2.1; Hutchinson 1990 for the traces. Uniform errors are sub-Gaussian with their own
variance.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mha.spec.directed import LAMBDA
from mha.spec.rounding_graph import RoundingGraph
from mha.spec.rounding_places import Place

# Of random signs, for the traces.
PROBES = 8


def explained_norm(graph: RoundingGraph, generator: torch.Generator) -> float:
    """Return the largest |y - y*| that rounding explains, over the rows that are known.

    generator: of the random signs. The probability of a false alarm is that of a directed test.

    >>> from mha.spec import Claims, Config, Problem, Weights
    >>> from mha.spec.rounding_graph import rounding_graph
    >>> config = Config(d_model=8, n_heads=2)
    >>> x = torch.linspace(-2, 2, 80).reshape(2, 5, 8).bfloat16()
    >>> problem = Problem(config, Weights.random(config, 0, x.dtype), x, x, x)
    >>> graph = rounding_graph(problem, Claims())
    >>> 0 < explained_norm(graph, torch.Generator()) < graph.output.norm()
    tensor(True)
    """
    gram, t = _gram(graph, generator), LAMBDA**2 / 2
    # M, the mean of w^T C w; F, that of (w^T C v)^2 over pairs of different signs; and S, at most
    # the root of the largest block's F
    diagonal = gram.diagonal(dim1=1, dim2=2)
    of_pairs = gram.square().sum((1, 2)) - diagonal.square().sum(1)
    of_items = of_pairs / (PROBES * (PROBES - 1))
    trace, square = float(diagonal.sum(0).mean()), float(of_items.sum())
    largest = math.sqrt(float(of_items.max()))
    random = math.sqrt(trace + 2 * math.sqrt(square * t) + 2 * largest * t)
    p, s, variance = graph.weights, graph.scores, graph.weights * graph.variance
    # d o / d log tau, and half of the second derivative of o by each score, at most
    scale = (p * (s - (p * s).sum(-1, keepdim=True))) @ graph.value
    second = variance @ graph.value - variance.sum(-1, keepdim=True) * graph.context
    random *= 1 + math.sqrt(float(graph.variance.max()))
    return random + graph.tau_error * _norm(graph, scale) + _norm(graph, second)


def _gram(graph: RoundingGraph, generator: torch.Generator) -> Tensor:
    """Return w^T C v for all pairs of random signs w and v, for each item, in float32.

    The shape is (B, PROBES, PROBES).
    """
    shape, narrow = graph.output.shape, graph.narrowed()
    drawn = torch.randint(0, 2, (PROBES, *shape), generator=generator).to(narrow.weights) * 2 - 1
    probes = [narrow.gradients(w.masked_fill(~graph.known, 0.0)) for w in drawn]
    total = graph.output.new_zeros(shape[0], PROBES, PROBES)
    for name, place in graph.places.items():
        deviation = _deviation(place, graph.store).float()
        first_uses = [probe[name][0] for probe in probes]
        grams = list[Tensor]()
        for form in zip(*first_uses, strict=True):
            moved = torch.stack([(g * deviation).flatten(1) for g in form], 1)
            grams.append(moved @ moved.mT)
        total += max(grams, key=_trace)
    return total


def _trace(gram: Tensor) -> float:
    return float(gram.diagonal(dim1=1, dim2=2).sum())


def _deviation(place: Place, store: float) -> Tensor:
    """Return s_k for the numbers of a place."""
    own = torch.as_tensor(place.own)
    return (store**2 * torch.as_tensor(place.powers()) / 3 + own.square()).sqrt()


def _norm(graph: RoundingGraph, contexts: Tensor) -> float:
    """Return the norm of what contexts (B, H, L, d_k) add to the output."""
    return float(graph.output_of(contexts).masked_fill(~graph.known, 0.0).norm())
