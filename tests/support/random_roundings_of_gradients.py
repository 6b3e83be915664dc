"""Random roundings of the backward pass, and the allowance of the directed test for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mha.spec import Claims, Config, Problem, Weights
from mha.spec.bounds import units_of
from mha.spec.directed import Allowance
from mha.spec.directed_gradients import allowance_of_gradients
from mha.spec.gradient_graph import GradientGraph, gradient_graph

# Forms of the backward pass: D as dC.o, and weights that are cast for dV alone.
FORMS = [(False, False), (True, False), (True, True)]


U = units_of(torch.float16).store


def small_problem(**config: Any) -> tuple[Problem, Tensor]:
    """Four heads that share two, three queries and five keys, with the gradient of the output."""
    sizes = Config(**{"d_model": 8, "n_heads": 4, "n_kv_heads": 2} | config)
    generator = torch.Generator().manual_seed(3)
    query, key, upstream = (
        torch.randn(2, length, 8, generator=generator).half() for length in (3, 5, 3)
    )
    return (
        Problem(sizes, Weights.random(sizes, 1, torch.float16), query, key, key.flip(1)),
        upstream,
    )


def random_direction(graph: GradientGraph, *names: str) -> dict[str, Tensor]:
    """A direction of independent normal numbers."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(graph.exact[name].shape, generator=generator, dtype=torch.float64)
        for name in names or graph.exact
    }


class Rounded:
    """The backward pass in float64; `store` changes each stored number, by its place."""

    def __init__(
        self,
        problem: Problem,
        upstream: Tensor,
        store: Callable[[str, Tensor], Tensor],
        form: tuple[bool, bool] = (False, False),
    ) -> None:
        self.problem, self.upstream, self.store = problem, upstream.double(), store
        self.of_output, self.recomputed = form

    def __call__(self, items: int = 1) -> dict[str, Tensor]:
        """The gradients by name; items: how often the batch is repeated with other roundings."""
        problem, store = self.problem, self.store
        given, width = problem.weights.to(torch.float64), problem.config.head_dim
        repeats, tau = problem.config.n_heads // problem.config.kv_heads, width**-0.5

        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, width)).transpose(1, 2)

        inputs = {
            name: getattr(problem, name).double().repeat(items, 1, 1)
            for name in ("query", "key", "value")
        }
        heads = {
            name: store(
                name, split(x @ getattr(given, f"w_{name[0]}").T + getattr(given, f"b_{name[0]}"))
            )
            for name, x in inputs.items()
        }
        q, (k, v) = (
            heads["query"],
            (heads[name].repeat_interleave(repeats, 1) for name in ("key", "value")),
        )
        p = (store("score", tau * q @ k.mT)).softmax(-1)
        used = p if self.recomputed else store("weight", p)
        o = store("context", used @ v)
        d_y = self.upstream.repeat(items, 1, 1)
        d_c = store("d_context", split(d_y @ given.w_o))
        d_p = store("d_weight", d_c @ v.mT)
        d = (
            (d_c * o).sum(-1, keepdim=True)
            if self.of_output
            else (used * d_p).sum(-1, keepdim=True)
        )
        d_s = store("d_score", used * (d_p - store("row_sum", d)))
        found = {
            "query": tau * d_s @ k,
            "key": (tau * d_s.mT @ q).unflatten(1, (-1, repeats)).sum(2),
            "value": (
                ((store("weight", p) if self.recomputed else used).mT @ d_c)
                .unflatten(1, (-1, repeats))
                .sum(2)
            ),
        }
        joined = {
            name: store(f"d_{name[0]}", x).transpose(1, 2).flatten(2) for name, x in found.items()
        }
        result = {
            name: store(f"gradient of {name}", x @ getattr(given, f"w_{name[0]}"))
            for name, x in joined.items()
        }
        for name, x in joined.items():
            result[f"w_{name[0]}"] = store(
                f"gradient of w_{name[0]}", x.flatten(0, 1).mT @ inputs[name].flatten(0, 1)
            )
        context = o.transpose(1, 2).flatten(2)
        return result | {
            "w_o": store("gradient of w_o", d_y.flatten(0, 1).mT @ context.flatten(0, 1))
        }


def random_projections(
    form: tuple[bool, bool], draws: int, seed: int = 0
) -> tuple[Tensor, Allowance]:
    """|T| over its standard deviation for random signs of all roundings, and what is allowed."""
    problem, upstream = small_problem()
    graph, generator = (
        gradient_graph(problem, Claims(), upstream),
        torch.Generator().manual_seed(seed),
    )

    def store(name: str, x: Tensor) -> Tensor:
        return x * (1 + U * torch.randint(0, 2, x.shape, generator=generator).mul(2).sub(1))

    direction = random_direction(graph, "query", "key", "value")
    part, found = (
        allowance_of_gradients(graph, direction),
        Rounded(problem, upstream, store, form)(draws),
    )
    errors = [
        ((found[name].unflatten(0, (draws, -1)) - graph.exact[name]) * w).sum((1, 2, 3))
        for name, w in direction.items()
    ]
    return torch.stack(errors).sum(0).abs() / part.sd, part
