"""The energy of an error: its mean and tail, and how near correct implementations come."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.implementations import resolve
from mha.spec import Claims, Rounding
from mha.spec.energy import _deviation, _gram, explained_norm
from mha.spec.rounding_graph import RoundingGraph, rounding_graph
from mha.spec.rounding_places import power_below
from support.random_problems import built

SMALL = Case(n_heads=2, head_dim=4, B=2, L=3, S=5, dtype="bfloat16", seed=3)
# With one form for each number, so that there is one Jacobian.
ROUNDING = Rounding(scores_stored=False, weights_stored=False, scaling_roundings=0)


def jacobian(graph: RoundingGraph) -> Tensor:
    """s_k dy* / dx_k, a row for each element of the output and a column for each number x_k."""
    rows = []
    for element in range(graph.output.numel()):
        single = torch.zeros_like(graph.output).flatten()
        single[element] = 1.0
        gradients = graph.gradients(single.view_as(graph.output))
        parts = [
            gradients[name][0][0] * _deviation(place, graph.store)
            for name, place in graph.places.items()
        ]
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


def test_random_signs_give_the_traces() -> None:
    graph = rounding_graph(SMALL.problem(), Claims(rounding=ROUNDING))
    scaled = jacobian(graph)
    covariance = scaled @ scaled.T
    generator = torch.Generator().manual_seed(0)
    grams = torch.stack([_gram(graph, generator).sum(0) for _ in range(400)])
    off_diagonal = ~torch.eye(grams.shape[-1], dtype=torch.bool)
    assert float(grams.diagonal(dim1=1, dim2=2).mean()) == pytest.approx(
        float(covariance.trace()), rel=0.02
    )
    assert float(grams[:, off_diagonal].square().mean()) == pytest.approx(
        float(covariance.square().sum()), rel=0.05
    )


def test_uniform_errors_stay_below_the_tail_and_the_threshold() -> None:
    graph = rounding_graph(SMALL.problem(), Claims(rounding=ROUNDING))
    scaled = jacobian(graph)
    drawn = torch.rand(
        scaled.shape[1], 20000, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    energies = (scaled @ (math.sqrt(3) * (2 * drawn - 1))).square().sum(0)
    values = torch.linalg.eigvalsh(scaled @ scaled.T)
    assert float(energies.mean()) == pytest.approx(float(values.sum()), rel=0.02)
    for t in (1.0, 3.0, 5.0):
        limit = values.sum() + 2 * (values.square().sum() * t).sqrt() + 2 * values.max() * t
        assert float((energies > limit).double().mean()) <= math.exp(-t)
    assert float(energies.max().sqrt()) < explained_norm(graph, torch.Generator())


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_mean_is_that_of_an_implementation_that_stores_all_it_declares(dtype: str) -> None:
    """`tiled` stores projections, contexts and outputs, and without biases each of them once."""
    problem = Case(n_heads=8, head_dim=16, bias=False, B=32, L=33, S=33, dtype=dtype).problem()
    (resolved,) = resolve("tiled")
    graph = rounding_graph(problem, resolved.implementation.claims)
    output = built(resolved.implementation, problem)(
        problem.query, problem.key, problem.value
    ).output
    energy = float((output.double() - graph.output).square().sum())
    mean = float(_gram(graph, torch.Generator()).diagonal(dim1=1, dim2=2).sum(0).mean())
    assert (
        0.9 < energy / mean < 1.02
    )  # errors of accumulators count in full, which shows in float16
    assert math.sqrt(energy) < explained_norm(graph, torch.Generator()) < 1.2 * math.sqrt(mean)


def test_half_a_unit_in_the_last_place_is_that_of_the_power_of_two_below() -> None:
    numbers = torch.tensor([1.0, 1.99, -2.0, 0.0, 6e-8, 5e-5], dtype=torch.float64)
    least = torch.finfo(torch.float16).tiny
    assert power_below(numbers, torch.float16).tolist() == [1.0, 1.0, 2.0, 0.0, least, least]
