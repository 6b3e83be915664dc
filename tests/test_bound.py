"""The bound: no correct implementation exceeds it, it is exact where it should be, and small errors exceed it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.layouts import LAYOUTS
from mha.conformance.cases.masks import EXTENTS
from mha.conformance.cases.regimes import REGIMES
from mha.implementations.loop import implementation as loop
from mha.implementations.sdpa import implementation as sdpa
from mha.implementations.vectorized import implementation as vectorized
from mha.spec import Answer, Claims, Implementation, Output, Problem, oracle
from mha.spec.bounds import Ball

IMPLEMENTATIONS = {"loop": loop, "vectorized": vectorized, "sdpa": sdpa}
DTYPES = ("float32", "float64")
CASES = 120
SEEDS = 24
# The relative error of one number that must show, in every seed.
MUST_SHOW = {"float32": 1e-2, "float64": 1e-9}
ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-53}
MASKED = ("keys", "padding", "items", "full", "single", "head_bias", "empty_rows", "empty_item")


def drawn(rng: random.Random, dtype: str) -> Case:
    """A case of any kind."""
    inputs = rng.choice(("cross", "self"))
    queries, keys = rng.choice((1, 2, 3, 7, 16, 33)), rng.choice((1, 2, 5, 11, 17, 65, 129))
    return Case(
        n_heads=rng.choice((1, 2, 3, 4)),
        head_dim=rng.choice((1, 2, 3, 5, 8)),
        bias=rng.choice((True, False)),
        B=rng.choice((1, 2, 3)),
        L=queries,
        S=queries if inputs == "self" else keys,
        dtype=dtype,
        mask=rng.choice(("none", *EXTENTS)),
        causal=rng.choice((True, False)),
        inputs=inputs,
        layout=rng.choice(tuple(LAYOUTS)),
        regime=rng.choice(tuple(REGIMES)),
        seed=rng.randrange(2**31),
    )


def moderate(seed: int, dtype: str, mask: str) -> Problem:
    """A problem in which no score is extreme and no sum is trivial."""
    rng = random.Random(seed)
    sizes = {"n_heads": rng.choice((1, 2, 3)), "head_dim": rng.choice((2, 3, 5, 8)), "B": rng.choice((1, 2))}
    lengths = {"L": rng.choice((1, 2, 5, 7)), "S": rng.choice((2, 3, 5, 11, 17))}
    return Case(**sizes, **lengths, dtype=dtype, mask=mask, seed=seed).problem()


def built(implementation: Implementation, problem: Problem) -> Any:
    """The implementation with the problem's weights."""
    return implementation.build(problem.config, problem.weights, dtype=problem.query.dtype, device="cpu").eval()


@torch.no_grad()
def solved(implementation: Implementation, problem: Problem) -> Output:
    """What the implementation gives."""
    return built(implementation, problem)(
        problem.query,
        problem.key,
        problem.value,
        mask=problem.mask,
        is_causal=problem.is_causal,
        need_weights=implementation.claims.returns_weights,
    )


def ratio(result: Tensor, expected: Ball) -> float:
    """The largest error/bound: more than 1 is a failure, and so is a result that is not finite."""
    error = (result.double() - expected.mid).abs().nan_to_num(nan=float("inf"))
    return float(torch.where(error > 0, error / expected.rad, 0.0).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_no_correct_implementation_exceeds_it(name: str, dtype: str, record_property: Callable[..., None]) -> None:
    implementation, rng, largest = IMPLEMENTATIONS[name], random.Random(20171206), 0.0
    for _ in range(CASES):
        case = drawn(rng, dtype)
        problem = case.problem()
        answer, result = oracle(problem, implementation.claims), solved(implementation, problem)
        parts = [(result.output, answer.output)]
        if result.weights is not None:
            parts.append((result.weights, answer.weights))
        for part, expected in parts:
            assert expected.rad.isfinite().all(), f"{case!r} has a bound that says nothing"
            largest = max(largest, ratio(part, expected))
            assert largest < 1, f"{case!r}: error/bound is {largest}"
    record_property("largest error/bound", largest)
    assert largest > 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("regime", ["normal", "large"])
def test_scores_may_err_as_much_as_rounding_does(regime: str, dtype: str, seed: int) -> None:
    """Errors of the scores that pull one channel of every head one way, put in by the mask, are granted.

    They are (d_k + 5) roundoffs of the terms of each score: the product, two scalings of its factors and one storing.
    """
    problem = Case(n_heads=3, head_dim=5, B=2, L=7, S=11, dtype=dtype, regime=regime, seed=seed).problem()
    answer, heads, given = oracle(problem, Claims()), (3, 5), problem.weights
    query = (problem.query.double() @ given.w_q.double().T + given.b_q.double()).unflatten(-1, heads)
    key = (problem.key.double() @ given.w_k.double().T + given.b_k.double()).unflatten(-1, heads)
    size = torch.einsum("blhd,bshd->bhls", query.abs(), key.abs()) / 5**0.5
    above = answer.value.mid[..., 0].transpose(1, 2).unsqueeze(2) > answer.context.mid[..., ::5].mT.unsqueeze(-1)
    pushed = problem.change(mask=10 * ROUNDOFF[dtype] * size * torch.where(above, 1.0, -1.0))
    moved = (oracle(pushed, Claims()).context.mid - answer.context.mid)[..., ::5]
    assert (moved >= 0).all()
    assert (moved <= answer.context.rad[..., ::5]).all()
    assert float((moved / answer.context.rad[..., ::5]).max()) > 0.1, "the bound is far larger than what can happen"
