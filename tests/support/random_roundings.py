"""Random roundings of the forward pass, and the allowance of the directed test for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mha.spec import Claims, Config, Problem, Rounding, Weights
from mha.spec.bounds import units_of
from mha.spec.directed import Allowance, allowance
from mha.spec.rounding_graph import RoundingGraph, rounding_graph
from support.random_problems import STRICT

PROFILES = {
    "strict": STRICT,
    "scaled": replace(STRICT, scaling_roundings=2),
    "scores": replace(STRICT, scores_stored=True),
    "weights": replace(STRICT, weights_stored=True),
    "softmax": replace(STRICT, softmax_stored=True),
    "default": Rounding(),
}


def random_direction(graph: RoundingGraph, seed: int = 0) -> Tensor:
    """A direction of independent normal numbers."""
    return torch.randn(
        graph.output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


class Rounded:
    """Attention in float64 that multiplies each number which may be stored by 1 + delta.

    summed: whether the sum of a row is of the weights as they are stored.
    """

    def __init__(
        self,
        problem: Problem,
        rounding: Rounding,
        draw: Callable[[Tensor], Tensor],
        summed: bool = False,
    ) -> None:
        self.problem, self.rounding, self.draw, self.summed = problem, rounding, draw, summed

    def store(self, x: Tensor, stored: bool = True) -> Tensor:
        """x (1 + delta), if it is stored at all."""
        return x * (1 + self.draw(x)) if stored else x

    def project(self, x: Tensor, role: str) -> Tensor:
        """A projection, stored before and after its bias."""
        given = self.problem.weights.to(torch.float64)
        product, bias = self.store(x @ getattr(given, f"w_{role}").T), getattr(given, f"b_{role}")
        return product if bias is None else self.store(product + bias)

    def __call__(self, items: int = 1) -> Tensor:
        """The output (B, L, D); items: how often the batch is repeated with other roundings."""
        problem, rounding = self.problem, self.rounding
        width, repeats = problem.config.head_dim, problem.config.n_heads // problem.config.kv_heads
        inputs = (
            x.double().repeat(items, 1, 1) for x in (problem.query, problem.key, problem.value)
        )
        projected = (self.project(x, role) for x, role in zip(inputs, "qkv", strict=True))
        q, k, v = (x.unflatten(-1, (-1, width)).transpose(1, 2) for x in projected)
        q, k = (self.store(x, rounding.scaling_roundings > 0) for x in (q, k))
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        stored = rounding.scores_stored
        s = self.store(self.store(q @ k.mT, stored) * width**-0.5, stored)
        gap = s - s.detach().amax(-1, keepdim=True)
        e = self.store(self.store(gap, rounding.softmax_stored).exp(), rounding.softmax_stored)
        stored = rounding.weights_stored
        if self.summed:
            e, stored = self.store(e, stored), False
        p = self.store(e / self.store(e.sum(-1, keepdim=True), rounding.softmax_stored), stored)
        return self.project(self.store(p @ v).transpose(1, 2).flatten(2), "o")


def small_problem(dtype: str = "float16", **config: Any) -> Problem:
    """Two items, four heads that share two, three queries, five keys; no bias of keys."""
    sizes = Config(**{"d_model": 8, "n_heads": 4, "n_kv_heads": 2, "bias": "qvo"} | config)
    generator, kind = torch.Generator().manual_seed(3), getattr(torch, dtype)
    query, key = (
        torch.randn(2, length, sizes.d_model, generator=generator).to(kind) for length in (3, 5)
    )
    return Problem(sizes, Weights.random(sizes, 1, kind), query, key, key.flip(1))


def random_projections(profile: str, draws: int, seed: int = 0) -> tuple[Tensor, Allowance]:
    """|T| over its standard deviation for random signs of all roundings, and what is allowed."""
    problem, rounding = small_problem(), PROFILES[profile]
    graph, generator = (
        rounding_graph(problem, Claims(rounding=rounding)),
        torch.Generator().manual_seed(seed),
    )
    u = units_of(torch.float16).store

    def draw(x: Tensor) -> Tensor:
        return u * torch.randint(0, 2, x.shape, generator=generator).mul(2).sub(1)

    direction = random_direction(graph)
    part = allowance(graph, direction)
    error = Rounded(problem, rounding, draw)(draws).unflatten(0, (draws, -1)) - graph.output
    return (error * direction).sum((1, 2, 3)).abs() / part.sd, part
