"""The rounding graph with norms and rotations: its gradients, and kernels that round as it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mha.implementations.formula import on_the_way
from mha.spec import Claims, Config, Problem, QkNorm, Rotary, Rounding, Weights, oracle
from mha.spec.directed import allowance, projection
from mha.spec.gradient_graph import gradient_graph
from mha.spec.rounding_graph import RoundingGraph, rounding_graph
from support.effort import tried

PLAIN = Rounding(
    scores_stored=False,
    softmax_stored=False,
    weights_stored=False,
    scaling_roundings=0,
    log_normaliser=False,
    rescales=0,
)
CHANGES: list[dict[str, Any]] = [
    {"rotary": Rotary()},
    {"rotary": Rotary(500000.0, "interleaved", part=0.5), "qk_norm": QkNorm()},
    {"rotary": Rotary(direction="backward"), "qk_norm": QkNorm("layer", "width", weight="offset")},
    {"rotary": Rotary(), "qk_norm": QkNorm("l2", eps=1e-24, weight=None), "scale": 5.0},
    {"rotary": Rotary(), "qk_norm": QkNorm("rms", before_rotary=False, weight=None)},
]


def problem_of(claims: Claims, dtype: torch.dtype, seed: int) -> Problem:
    """Return self-attention of two items, whose heads share two keys and values."""
    config = Config(64, 4, n_kv_heads=2, norm_weights=claims.norm_weights)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 17, 64, generator=generator, dtype=torch.float64).to(dtype)
    return Problem(config, Weights.random(config, seed, dtype), x, x, x)


def computed(problem: Problem, claims: Claims, dtype: torch.dtype) -> Tensor:
    """Return the output of a kernel whose norm and rotation are in a dtype."""

    def heads(role: str) -> Tensor:
        x = F.linear(problem.query, *problem.weights.of(role))
        x = x.unflatten(-1, (-1, problem.config.head_dim)).transpose(1, 2)
        if role != "v":
            weight = getattr(problem.weights, f"{role}_norm")
            if weight is not None:
                weight = weight.to(dtype)
            positions = torch.arange(x.shape[2])
            x = on_the_way(x.to(dtype), claims, weight, positions).to(x.dtype)
        return x.repeat_interleave(problem.config.n_heads // x.shape[1], 1)

    q, k, v = map(heads, "qkv")
    context = F.scaled_dot_product_attention(q, k, v, scale=claims.scale_for(q.shape[-1]))
    return F.linear(context.transpose(1, 2).flatten(2), *problem.weights.of("o"))


def graph_of(changes: dict[str, Any], dtype: torch.dtype, seed: int = 0) -> RoundingGraph:
    claims = Claims(grouped_query=True, rounding=PLAIN, **changes)
    return rounding_graph(problem_of(claims, dtype, seed), claims)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_graph_is_the_oracle_and_goes_back_as_autograd_does(changes: dict[str, Any]) -> None:
    claims = Claims(grouped_query=True, rounding=PLAIN, **changes)
    graph = graph_of(changes, torch.bfloat16)
    expected = oracle(problem_of(claims, torch.bfloat16, 0), claims).output.mid
    torch.testing.assert_close(graph.output, expected)
    w = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
    found = graph.gradients(w)
    for way in graph.ways:
        leaf = heads = way.before[0].clone().requires_grad_()
        for step in way.steps:
            heads = step.exact(heads)
        ((arriving,),) = found[way.name]
        (gradient,) = torch.autograd.grad((heads * arriving).sum(), leaf)
        torch.testing.assert_close(found[f"projected {way.name}"][0][0], gradient)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_stay_within_what_is_allowed(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    claims = Claims(grouped_query=True, rounding=PLAIN, **changes)
    for seed in range(tried(2, 40)):
        problem, graph = problem_of(claims, dtype, seed), graph_of(changes, dtype, seed)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(graph.output.shape, generator=generator, dtype=torch.float64)
        for wide in (torch.float32, dtype):
            output = computed(problem, claims, wide)
            for direction in (graph.output, drawn):
                part = allowance(graph, direction)
                assert abs(projection(graph, output, direction)) < 0.5 * part.threshold


def test_another_base_is_found_along_its_own_direction() -> None:
    claims = Claims(grouped_query=True, rounding=PLAIN, rotary=Rotary())
    graph, other = (
        graph_of(CHANGES[0], torch.bfloat16),
        Claims(grouped_query=True, rotary=Rotary(base=30000.0)),
    )
    wrong = computed(problem_of(claims, torch.bfloat16, 0), other, torch.float32)
    direction = wrong.double() - graph.output
    assert abs(projection(graph, wrong, direction)) > allowance(graph, direction).threshold


def test_gradients_have_no_graph_yet() -> None:
    claims = Claims(grouped_query=True, rotary=Rotary())
    problem = problem_of(claims, torch.bfloat16, 0)
    with pytest.raises(ValueError, match="has no norm and no rotation"):
        gradient_graph(problem, claims, torch.ones_like(problem.query))
