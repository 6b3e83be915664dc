"""The bound: no correct implementation exceeds it, it is exact where it should be, and small errors exceed it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.layouts import LAYOUTS
from mha.conformance.cases.masks import EXTENTS
from mha.conformance.cases.values import VALUES
from mha.implementations.loop import implementation as loop
from mha.implementations.sdpa import implementation as sdpa
from mha.implementations.vectorized import implementation as vectorized
from mha.spec import Claims, Config, Implementation, Output, Problem, Rounding, Weights, oracle
from mha.spec.bounds import Ball

IMPLEMENTATIONS = {"loop": loop, "vectorized": vectorized, "sdpa": sdpa}
DTYPES = ("float32", "float64")
DIVIDES = Claims(rounding=Rounding(log_normaliser=False))
CASES = 120
SEEDS = 24
# The relative error of one number that must show, in every seed.
MUST_SHOW = {"float32": 1e-2, "float64": 1e-9}
# In float64 the oracle rounds as much as what it judges.
ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-52}
# What part of a context's bound the errors of the scores can reach: nearly all where they outweigh all others.
REACHED = {"normal": 0.3, "heavy": 0.4, "integers": 0.6, "offset": 0.9}
MASKED = ("keys", "padding", "items", "full", "single", "head_bias", "empty_rows", "empty_item")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The tensors are small: threads would wait for one another, for a minute on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
        values=rng.choice(tuple(VALUES)),
        seed=rng.randrange(2**31),
    )


def moderate(seed: int, dtype: str, mask: str) -> Problem:
    """A problem in which no score is extreme and no sum is trivial; the entries of its mask, if any, are finite."""
    rng = random.Random(seed)
    sizes = {"n_heads": rng.choice((1, 2, 3)), "head_dim": rng.choice((2, 3, 5, 8)), "B": rng.choice((1, 2))}
    lengths = {"L": rng.choice((1, 2, 5, 7)), "S": rng.choice((2, 3, 5, 11, 17))}
    problem = Case(**sizes, **lengths, dtype=dtype, mask=mask, seed=seed).problem()
    return problem if problem.mask is None else problem.change(mask=problem.mask.nan_to_num(neginf=0.0))


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


def granted(problem: Problem) -> Tensor:
    """The first-order error of each score, (B, H, L, S), from Higham's rules alone.

    A projection: n + 1 terms and a storing; a score: d_k terms, two scalings, four roundings of the scale, a storing.
    """
    given, heads = problem.weights.to(torch.float64), (problem.config.n_heads, problem.config.head_dim)
    sizes = []
    for x, weight, bias in ((problem.query, given.w_q, given.b_q), (problem.key, given.w_k, given.b_k)):
        mid, size = x.double() @ weight.T + bias, x.double().abs() @ weight.T.abs() + bias.abs()
        error = (weight.shape[1] + 1) * size + mid.abs()
        sizes += [mid.abs().unflatten(-1, heads), error.unflatten(-1, heads)]
    query, query_error, key, key_error = sizes
    terms = [((heads[1] + 7) * query, key), (query_error, key), (query, key_error)]
    return sum(torch.einsum("blhd,bshd->bhls", *pair) for pair in terms) / heads[1] ** 0.5


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", REACHED)
@pytest.mark.parametrize("n_heads", [1, 3])
def test_it_grants_scores_their_rounding_and_little_more(n_heads: int, values: str, dtype: str, seed: int) -> None:
    """The mask puts errors into the scores, such as pull one channel of every head one way."""
    problem = Case(n_heads=n_heads, head_dim=5, B=2, L=7, S=11, dtype=dtype, values=values, seed=seed).problem()
    answer = oracle(problem, DIVIDES)
    above = answer.value.mid[..., 0].unsqueeze(2) > answer.context.mid[..., ::5].mT.unsqueeze(-1)
    mask = ROUNDOFF[dtype] * granted(problem) * torch.where(above, 1.0, -1.0)
    pulled = oracle(problem.change(mask=mask), DIVIDES)
    assert REACHED[values] < ratio(pulled.context.mid[..., ::5], answer.context[..., ::5]) <= 1
    assert 0.3 < ratio(pulled.weights.mid, answer.weights) <= 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_keys_have_no_error(dtype: str, mask: str, causal: bool) -> None:
    case = Case(n_heads=3, head_dim=5, B=2, L=7, S=11, dtype=dtype, mask=mask, causal=causal)
    problem = case.problem()
    answer, blocked = oracle(problem, DIVIDES), ~problem.allowed("top_left")
    empty = blocked.all(-1).transpose(1, 2).repeat_interleave(case.head_dim, -1)
    assert blocked.any()
    assert not answer.weights.mid[blocked].any()
    assert not answer.weights.rad[blocked].any()
    assert (answer.weights.rad[~blocked] > 0).all()
    assert not answer.context.rad[empty].any()
    assert (answer.context.rad[~empty] > 0).all()


def context_radius(problem: Problem) -> float:
    """The largest bound of a context."""
    return float(oracle(problem, DIVIDES).context.rad.max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_values_hide_the_errors_of_scores(dtype: str) -> None:
    """Scores far from zero, and near each other as before, have large errors: only different values show them."""
    apart = Case(n_heads=3, head_dim=5, B=2, L=7, S=11, dtype=dtype).problem()
    near = apart.change(value=apart.value[:, :1].expand_as(apart.value))
    far = apart.key + 300
    assert context_radius(near.change(key=far)) < 1.01 * context_radius(near)
    assert context_radius(apart.change(key=far)) > 100 * context_radius(apart)


def central(weights: Tensor) -> tuple[Tensor, ...]:
    """The place of the weight nearest 1/2: what depends on it moves the most."""
    return torch.unravel_index((weights * (1 - weights)).argmax(), weights.shape)


def wrong_scale(problem: Problem, eps: float) -> Output:
    """The scale is 1 + eps times too large."""
    given = problem.weights
    bias = None if given.b_q is None else given.b_q * (1 + eps)
    return solved(vectorized, problem.change(w_q=given.w_q * (1 + eps), b_q=bias))


@torch.no_grad()
def wrong_weight(problem: Problem, eps: float) -> Output:
    """One weight is 1 + eps times too large."""
    module, weights = built(vectorized, problem).module, solved(vectorized, problem).weights
    assert weights is not None
    weights[central(weights)] *= 1 + eps
    context = weights @ module.split(module.v_proj(problem.value))
    return Output(module.out_proj(module.merge(context)), weights)


def wrong_mask(problem: Problem, eps: float) -> Output:
    """One entry of the additive mask is eps too large."""
    weights = solved(vectorized, problem).weights
    assert weights is not None
    assert problem.mask is not None
    mask = problem.mask.expand(problem.shape).clone()
    mask[central(weights)] += eps
    return solved(vectorized, problem.change(mask=mask))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("defect", [wrong_scale, wrong_weight, wrong_mask])
def test_small_errors_exceed_it(defect: Callable[[Problem, float], Output], dtype: str, seed: int) -> None:
    problem = moderate(seed, dtype, mask="head_bias" if defect is wrong_mask else "none")
    answer = oracle(problem, vectorized.claims)
    right, wrong = defect(problem, 0.0), defect(problem, MUST_SHOW[dtype])
    for part in ("output", "weights"):
        assert ratio(getattr(right, part), getattr(answer, part)) < 1
        assert ratio(getattr(wrong, part), getattr(answer, part)) > 1


def test_nothing_is_known_where_a_projection_overflows() -> None:
    config = Config(d_model=2, n_heads=1, bias=False)
    one = torch.eye(2, dtype=torch.float16)
    weights = Weights(w_q=300 * one, w_k=one, w_v=one, w_o=one)
    query, key = (torch.tensor([[row]], dtype=torch.float16) for row in ([300.0, 1.0], [0.0, 1.0]))
    problem = Problem(config, weights, query, torch.cat([key, -key], 1), torch.cat([key, -key], 1))
    answer = oracle(problem, Claims())
    assert answer.weights.rad.isinf().all()
    assert answer.output.rad.isinf().all()
