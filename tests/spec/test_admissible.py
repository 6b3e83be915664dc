"""Admissible roundings, drawn at every node of the core: none may exceed the bound.

Each step is computed in float64, and then multiplied by a number within a unit roundoff of 1. The
roundoffs are large, so that products of two of them count as well.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mha.spec import Rounding
from mha.spec.bounds import Ball, Units
from mha.spec.core import attend
from mha.spec.heads import Heads, Precision

DRAWS = int(os.environ.get("ADMISSIBLE_DRAWS", "240"))
COARSE = Units(accumulate=2.0**-10, store=2.0**-8, subnormal=0.0, flush=0.0, largest=math.inf)
EXPONENTIAL = 12
WHOLE = Rounding(softmax_stored=False, scaling_roundings=0, log_normaliser=False, rescales=0)
STORED = Rounding(scaling_roundings=0, log_normaliser=False, rescales=0)
TILED = Rounding(
    scores_stored=False, softmax_stored=False, scaling_roundings=0, log_normaliser=False
)
SPLIT = Rounding(scores_stored=False, softmax_stored=False, scaling_roundings=0, rescales=0)


class Rounder:
    """Errors of each step, (DRAWS, keys) or (DRAWS, keys, width).

    A third of the draws has a random sign at each place, another one the signs of the keys at every
    step, and the last one those signs or the opposite ones, step by step. side: the signs (S,),
    those of the keys whose values are above the context: when these get more, and the others less,
    it moves most.
    """

    def __init__(self, side: Tensor, generator: torch.Generator) -> None:
        self.side, self.generator = side, generator

    def sign(self, like: Tensor) -> Tensor:
        """Return 1 or -1 for each number of a step."""
        drawn = torch.randint(2, like.shape, generator=self.generator).double() * 2 - 1
        of_keys = torch.ones((), dtype=torch.float64)
        if like.shape[1:2] == self.side.shape:
            of_keys = self.side.view(1, -1, *[1] * (like.ndim - 2))
        kind = (torch.arange(DRAWS) % 3).view(-1, *[1] * (like.ndim - 1))
        of_step = torch.randint(2, kind.shape, generator=self.generator) * 2 - 1
        aligned = of_keys * torch.where(kind == 1, 1, of_step)
        return torch.where(kind == 0, drawn, aligned)

    def near(self, x: Tensor, times: float = 1.0, unit: float = COARSE.accumulate) -> Tensor:
        """Round to the accumulator."""
        return x * (1 + times * unit * self.sign(x))

    def kept(self, x: Tensor) -> Tensor:
        """Round to the storage dtype."""
        return self.near(x, unit=COARSE.store)

    def summed(self, terms: Tensor) -> Tensor:
        """Add up the terms along the last axis, one after another."""
        total = terms[..., 0]
        for place in range(1, terms.shape[-1]):
            total = self.near(total + terms[..., place])
        return total

    def scores(self, q: Tensor, k: Tensor, tau: float, *, store: bool) -> Tensor:
        """Return the scores (DRAWS, S) of q (d,) and k (S, d)."""
        products = self.summed(self.near((q * k).expand(DRAWS, *k.shape)))
        scale = torch.full((DRAWS, 1), tau, dtype=torch.float64)
        for _ in range(3):  # a root, a division, a cast
            scale = self.near(scale)
        if store:
            return self.kept(self.kept(products) * scale)
        return self.near(products * scale)

    def raised(self, difference: Tensor) -> Tensor:
        return self.near(difference.exp(), EXPONENTIAL)

    def averaged(self, weights: Tensor, v: Tensor) -> Tensor:
        """Return the sum of weights (DRAWS, S) times v (S, d)."""
        return self.summed(self.near(weights.unsqueeze(-1) * v).mT)


Step = Callable[[Rounder, Tensor, Tensor, Tensor, float], tuple[Tensor | None, Tensor]]


def whole(r: Rounder, q: Tensor, k: Tensor, v: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Scores and weights are stored, the softmax is in the accumulator."""
    scores = r.scores(q, k, tau, store=True)
    raised = r.raised(r.near(scores - scores.amax(-1, keepdim=True)))
    weights = r.kept(r.near(raised / r.summed(raised).unsqueeze(-1)))
    return weights, r.kept(r.averaged(weights, v))


def stored(r: Rounder, q: Tensor, k: Tensor, v: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Every step is stored."""
    scores = r.scores(q, k, tau, store=True)
    raised = r.kept(r.raised(r.kept(scores - scores.amax(-1, keepdim=True))))
    weights = r.kept(raised / r.kept(r.summed(raised)).unsqueeze(-1))
    return weights, r.kept(r.averaged(weights, v))


def tiled(r: Rounder, q: Tensor, k: Tensor, v: Tensor, tau: float) -> tuple[None, Tensor]:
    """An online softmax, key by key, to base two."""
    scores = r.near(r.scores(q, k, tau, store=False) * math.log2(math.e)) * math.log(2)
    highest, total, context = (
        scores[:, :1],
        torch.ones(DRAWS, 1, dtype=torch.float64),
        r.near(v[0].expand(DRAWS, -1)),
    )
    for place in range(1, len(k)):
        score = scores[:, place : place + 1]
        higher = torch.maximum(highest, score)
        rescale, raised = (r.raised(r.near(x - higher)) for x in (highest, score))
        rescale, raised = (
            rescale.where(highest < higher, torch.ones(())),
            raised.where(score < higher, torch.ones(())),
        )
        total = r.near(r.near(total * rescale) + raised)
        context = r.near(r.near(context * rescale) + r.near(r.kept(raised) * v[place]))
        highest = higher
    return None, r.kept(r.near(context / total))


def of_logarithms(r: Rounder, q: Tensor, k: Tensor, v: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Weights are exponentials of scores less a log-sum-exp, which is kept in the accumulator."""
    scores = r.scores(q, k, tau, store=True)
    top = scores.amax(-1, keepdim=True)
    total = r.summed(r.raised(r.near(scores - top))).unsqueeze(-1)
    weights = r.kept(r.raised(r.near(scores - r.near(top + r.near(total.log(), 4)))))
    return weights, r.kept(r.averaged(weights, v))


def split(r: Rounder, q: Tensor, k: Tensor, v: Tensor, tau: float) -> tuple[None, Tensor]:
    """Two parts of the keys, each with its log-sum-exp, are merged."""
    scores, half = r.scores(q, k, tau, store=False), len(k) // 2
    lses, contexts = [], []
    for part, values in ((scores[:, :half], v[:half]), (scores[:, half:], v[half:])):
        top = part.amax(-1, keepdim=True)
        raised = r.raised(r.near(part - top))
        total = r.summed(raised).unsqueeze(-1)
        lses.append(r.near(top + r.near(total.log(), 4)))
        contexts.append(r.near(r.averaged(r.kept(raised), values) / total))
    merged = torch.cat(lses, -1)
    top = merged.amax(-1, keepdim=True)
    lse = r.near(top + r.near(r.summed(r.raised(r.near(merged - top))).unsqueeze(-1).log(), 4))
    factors = [r.raised(r.near(each - lse)) for each in lses]
    return None, r.kept(r.near(r.near(contexts[0] * factors[0]) + r.near(contexts[1] * factors[1])))


FORMS: dict[str, tuple[Step, Rounding]] = {
    "whole rows": (whole, WHOLE),
    "every step stored": (stored, STORED),
    "key by key": (tiled, TILED),
    "split keys": (split, SPLIT),
    "log-sum-exp": (of_logarithms, replace(SPLIT, scores_stored=True)),
}


def problems() -> Iterator[tuple[Tensor, Tensor, Tensor, torch.Generator]]:
    """Queries (d,), keys (S, d) and values (S, d): scores near, far apart, or growing."""
    for seed in range(48):
        generator = torch.Generator().manual_seed(seed)
        width, keys, size = 1 + seed % 3, (2, 3, 5, 9)[seed // 3 % 4], (0.3, 1.0, 3.0)[seed % 3]
        q = size * torch.randn(width, generator=generator, dtype=torch.float64)
        k, v = (
            torch.randn(keys, width, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        if seed % 5 == 0:  # the maximum grows at every key, and the values with it
            q, k, v = q.abs(), k.abs().sort(0).values, v.sort(0).values
        yield q, k, v, generator


@pytest.mark.parametrize("form", FORMS)
def test_admissible_roundings_stay_within_the_bound(
    form: str, record_property: Callable[..., None]
) -> None:
    compute, rounding = FORMS[form]
    precision, largest = Precision(COARSE, COARSE, rounding, EXPONENTIAL), 0.0
    for q, k, v, generator in problems():
        heads = Heads(
            *(Ball.exact(x.view(1, 1, -1, x.shape[-1])) for x in (q, k, v)),
            torch.ones(1, 1, 1, len(k), dtype=torch.bool),
        )
        tau = len(q) ** -0.5
        found = attend(heads, tau, precision, "zeros")
        side = (v[:, 0] > found.context.mid[0, 0, 0, 0]).double() * 2 - 1
        computed = compute(Rounder(side, generator), q, k, v, tau)
        for actual, ball in zip(computed, (found.weights, found.context), strict=True):
            if actual is not None:
                largest = max(
                    largest, float(((actual - ball.mid[0, 0]).abs() / ball.rad[0, 0]).max())
                )
    record_property("largest error/bound", largest)
    assert 0.25 < largest <= 1
