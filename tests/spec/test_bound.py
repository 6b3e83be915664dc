"""The bound: no correct implementation exceeds it, and small errors do."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.implementations import resolve
from mha.spec import (
    Claims,
    Config,
    Implementation,
    Output,
    Problem,
    Rounding,
    Weights,
    bounds,
    core,
    gradients,
    oracle,
)
from mha.spec.bounds import Ball, units_of, weighted_distance
from mha.spec.claims import EmptyRow
from mha.spec.core import attend
from mha.spec.dtypes import TRAITS
from mha.spec.heads import Heads, Precision
from mha.spec.rounding_graph import rounding_graph
from support.effort import tried
from support.random_problems import (
    IMPLEMENTATIONS,
    MUST_EXCEED,
    built,
    moderate_problem,
    one_thread,
    random_case,
    ratio,
)

CASES = tried(40, 120)
SEEDS = 24
# A single precision of the softmax, without the rounding of a stored log-sum-exp.
PLAIN = Claims(rounding=Rounding(log_normaliser=False, rescales=0))
# In float64 the oracle rounds as much as an implementation.
ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-52}
# The part of a context's bound that errors of the scores can reach: nearly all where they outweigh
# all others.
REACHED = {"normal": 0.3, "heavy": 0.4, "integers": 0.6, "offset": 0.9}
MASKED = ("keys", "padding", "items", "full", "single", "head_bias", "empty_rows", "empty_item")
# Every field of `Rounding`, from the strictest value on.
LOOSER = {
    "scores_stored": (False, True),
    "softmax_stored": (False, True),
    "scaling_roundings": (0, 1, 2),
    "exp_error": (4, 40),
    "log_normaliser": (False, True),
    "softmax_in_float32": (False, True),
    "weights_stored": (False, True),
    "products": ("ieee", "bf16x3", "tf32", "bf16"),
    "accumulator": ("", "truncated"),
    "reductions": (0, 1, 4),
    "rescales": (0, 1, None),
    "flushes": (False, True),
}

vectorized = IMPLEMENTATIONS["vectorized"]
_one_thread = pytest.fixture(autouse=True, scope="module")(one_thread)


@torch.no_grad()
def result_of(implementation: Implementation, problem: Problem) -> Output:
    """The result of a call."""
    result: Output = built(implementation, problem)(
        problem.query,
        problem.key,
        problem.value,
        mask=problem.mask,
        is_causal=problem.is_causal,
        need_weights=implementation.claims.returns_weights,
    )
    return result


@pytest.mark.parametrize("dtype", TRAITS)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_correct_implementations_stay_within_the_bound(
    name: str, dtype: str, record_property: Callable[..., None]
) -> None:
    implementation, rng, largest = IMPLEMENTATIONS[name], random.Random(20171206), 0.0
    for _ in range(CASES):
        case = random_case(rng, dtype)
        problem = case.problem()
        expected, result = (
            oracle(problem, implementation.claims),
            result_of(implementation, problem),
        )
        parts = [(result.output, expected.output)]
        if result.weights is not None:
            parts.append((result.weights, expected.weights))
        for part, ball in parts:
            assert ball.rad.isfinite().all() or dtype not in MUST_EXCEED, (
                f"{case!r} has a bound that proves nothing"
            )
            largest = max(largest, ratio(part, ball))
            assert largest < 1, f"{case!r}: error/bound is {largest}"
    record_property("largest error/bound", largest)
    assert largest > 0


def makes_a_difference(field: str, dtype: str) -> bool:
    """Whether it costs something: a store only does where the accumulator has another dtype."""
    if field in ("products", "flushes"):
        return dtype == {"products": "float32", "flushes": "float16"}[field]
    stores = field.endswith("_stored") or field == "reductions"
    return TRAITS[dtype].half or not stores


@pytest.mark.parametrize("dtype", TRAITS)
@pytest.mark.parametrize("field", LOOSER)
def test_looser_rounding_has_larger_radii(field: str, dtype: str) -> None:
    problem = Case(
        n_heads=3, head_dim=5, B=2, L=7, S=11, dtype=dtype, mask="head_bias", seed=1
    ).problem()
    strictest = Rounding(**{name: values[0] for name, values in LOOSER.items()})
    claims = [
        replace(PLAIN, rounding=replace(strictest, **{field: value})) for value in LOOSER[field]
    ]
    for stricter, looser in pairwise(oracle(problem, claim).output for claim in claims):
        assert torch.equal(stricter.mid, looser.mid)
        assert (stricter.rad <= looser.rad).all()
        if makes_a_difference(field, dtype):
            assert (stricter.rad < looser.rad).any()


def score_errors(problem: Problem) -> Tensor:
    """The first-order error of each score, (B, H, L, S), in unit roundoffs, by Higham's rules.

    A projection: n + 1 terms and a store. A score: d_k terms, two scalings, four roundings of the
    scale, a store.
    """
    given, heads = (
        problem.weights.to(torch.float64),
        (
            problem.config.n_heads,
            problem.config.head_dim,
        ),
    )
    sizes = []
    for x, weight, bias in (
        (problem.query, given.w_q, given.b_q),
        (problem.key, given.w_k, given.b_k),
    ):
        mid, size = x.double() @ weight.T + bias, x.double().abs() @ weight.T.abs() + bias.abs()
        error = (weight.shape[1] + 1) * size + mid.abs()
        sizes += [mid.abs().unflatten(-1, heads), error.unflatten(-1, heads)]
    query, query_error, key, key_error = sizes
    terms = [((heads[1] + 7) * query, key), (query_error, key), (query, key_error)]
    errors: Tensor = sum(torch.einsum("blhd,bshd->bhls", *pair) for pair in terms) / heads[1] ** 0.5
    return errors


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", MUST_EXCEED)
@pytest.mark.parametrize("values", REACHED)
@pytest.mark.parametrize("n_heads", [1, 3])
def test_errors_of_scores_reach_most_of_the_bound(
    n_heads: int, values: str, dtype: str, seed: int
) -> None:
    """A float mask adds errors to the scores, which all pull one channel the same way."""
    problem = Case(
        n_heads=n_heads, head_dim=5, B=2, L=7, S=11, dtype=dtype, values=values, seed=seed
    ).problem()
    expected = oracle(problem, PLAIN)
    above = expected.value.mid[..., 0].unsqueeze(2) > expected.context.mid[..., ::5].mT.unsqueeze(
        -1
    )
    mask = ROUNDOFF[dtype] * score_errors(problem) * torch.where(above, 1.0, -1.0)
    pulled = oracle(problem.change(mask=mask), PLAIN)
    assert REACHED[values] < ratio(pulled.context.mid[..., ::5], expected.context[..., ::5]) <= 1
    assert 0.3 < ratio(pulled.weights.mid, expected.weights) <= 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKED)
@pytest.mark.parametrize("dtype", MUST_EXCEED)
def test_masked_keys_have_no_error(dtype: str, mask: str, causal: bool) -> None:
    case = Case(n_heads=3, head_dim=5, B=2, L=7, S=11, dtype=dtype, mask=mask, causal=causal)
    problem = case.problem()
    expected, masked = oracle(problem, PLAIN), ~problem.allowed("top_left")
    empty = masked.all(-1).transpose(1, 2).repeat_interleave(case.head_dim, -1)
    assert masked.any()
    assert not expected.weights.mid[masked].any()
    assert not expected.weights.rad[masked].any()
    assert (expected.weights.rad[~masked] > 0).all()
    assert not expected.context.rad[empty].any()
    assert (expected.context.rad[~empty] > 0).all()


def context_radius(problem: Problem) -> float:
    """The largest radius of a context."""
    return float(oracle(problem, PLAIN).context.rad.max())


@pytest.mark.parametrize("dtype", MUST_EXCEED)
def test_equal_values_hide_the_errors_of_scores(dtype: str) -> None:
    """Scores far from zero have large errors, but only values that differ show them."""
    different = Case(n_heads=3, head_dim=5, B=2, L=7, S=11, dtype=dtype).problem()
    equal = different.change(value=different.value[:, :1].expand_as(different.value))
    far = different.key + 300
    assert context_radius(equal.change(key=far)) < 1.01 * context_radius(equal)
    assert context_radius(different.change(key=far)) > 100 * context_radius(different)


def central(weights: Tensor) -> tuple[Tensor, ...]:
    """The place of the weight nearest 1/2, on which a context depends the most."""
    return torch.unravel_index((weights * (1 - weights)).argmax(), weights.shape)


def scale_error(problem: Problem, eps: float) -> Output:
    """The scale is too large by the factor 1 + eps."""
    given = problem.weights
    bias = None if given.b_q is None else given.b_q * (1 + eps)
    return result_of(vectorized, problem.change(w_q=given.w_q * (1 + eps), b_q=bias))


@torch.no_grad()
def weight_error(problem: Problem, eps: float) -> Output:
    """One weight is too large by the factor 1 + eps."""
    module, weights = built(vectorized, problem).module, result_of(vectorized, problem).weights
    assert weights is not None
    weights[central(weights)] *= 1 + eps
    context = weights @ module.split(module.v_proj(problem.value))
    return Output(module.out_proj(module.merge(context)), weights)


def mask_error(problem: Problem, eps: float) -> Output:
    """One entry of the float mask is too large by eps."""
    weights = result_of(vectorized, problem).weights
    assert weights is not None
    assert problem.mask is not None
    mask = problem.mask.expand(problem.shape).clone()
    mask[central(weights)] += eps
    return result_of(vectorized, problem.change(mask=mask))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("dtype", MUST_EXCEED)
@pytest.mark.parametrize("defect", [scale_error, weight_error, mask_error])
def test_small_errors_exceed_the_bound(
    defect: Callable[[Problem, float], Output], dtype: str, seed: int
) -> None:
    problem = moderate_problem(seed, dtype, mask="head_bias" if defect is mask_error else "none")
    expected = oracle(problem, vectorized.claims)
    correct, incorrect = defect(problem, 0.0), defect(problem, MUST_EXCEED[dtype])
    for part in ("output", "weights"):
        ball: Ball = getattr(expected, part)
        assert ratio(getattr(correct, part), ball) < 1
        assert ratio(getattr(incorrect, part), ball) > 1


@pytest.mark.parametrize("dtype", TRAITS)
def test_sums_of_rows_do_not_depend_on_how_large_the_scores_are(dtype: str) -> None:
    case = Case(n_heads=3, head_dim=5, B=2, L=7, S=65, dtype=dtype, seed=1)
    for factor in (1, 16, 64):
        problem = case.problem()
        expected = oracle(problem.change(w_q=problem.weights.w_q * factor), PLAIN)
        largest = 2 * torch.finfo(problem.query.dtype).eps * (
            6 + math.log(65)
        ) + 300 * ROUNDOFF.get(dtype, 2.0**-24)
        assert expected.sums.rad.max() < largest


def test_nothing_is_known_where_a_projection_overflows() -> None:
    config = Config(d_model=2, n_heads=1, bias=False)
    one = torch.eye(2, dtype=torch.float16)
    weights = Weights(w_q=300 * one, w_k=one, w_v=one, w_o=one)
    query, key = (torch.tensor([[row]], dtype=torch.float16) for row in ([300.0, 1.0], [0.0, 1.0]))
    problem = Problem(config, weights, query, torch.cat([key, -key], 1), torch.cat([key, -key], 1))
    expected = oracle(problem, Claims())
    assert expected.weights.rad.isinf().all()
    assert expected.output.rad.isinf().all()
    assert expected.sums.rad.isinf().all()


@pytest.mark.parametrize("empty_row", ["zeros", "nan", "uniform"])
def test_empty_rows_are_exact(empty_row: Any) -> None:
    problem = Case(n_heads=3, head_dim=5, B=2, L=7, S=8, mask="empty_rows").problem()
    expected = oracle(problem, replace(PLAIN, empty_row=empty_row))
    value = {"zeros": 0.0, "nan": float("nan"), "uniform": 1 / 8}[empty_row]
    rows = expected.weights[expected.empty]
    assert rows.mid.numel() > 0
    assert torch.allclose(
        rows.mid, torch.full_like(rows.mid, value), rtol=1e-15, atol=0, equal_nan=True
    )
    assert (rows.rad <= (1e-4 if empty_row == "uniform" else 0.0)).all()


@pytest.mark.parametrize("empty_row", ["zeros", "uniform", "nan"])
@pytest.mark.parametrize("mask", ["none", "full_bias", "empty_rows"])
def test_blocks_of_queries_give_what_all_at_once_give(
    mask: str, empty_row: EmptyRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Case(B=2, n_heads=3, L=7, S=5, head_dim=4, mask=mask, seed=1).problem()
    claims = Claims(masks={"bool", "float"}, empty_row=empty_row)
    upstream = torch.ones_like(problem.query)
    whole, whole_gradients = oracle(problem, claims), gradients(problem, claims, upstream)
    monkeypatch.setattr(core, "CHUNK", 2 * 3 * 5 * 2)  # two queries at a time
    parts = oracle(problem, claims)
    for name, gradient in gradients(problem, claims, upstream).items():
        one = whole_gradients[name]
        torch.testing.assert_close(gradient.mid, one.mid, rtol=1e-13, atol=1e-13, equal_nan=True)
        torch.testing.assert_close(gradient.rad, one.rad, rtol=1e-12, atol=0.0, equal_nan=True)
    for name in ("output", "weights", "context", "sums"):
        one, other = getattr(whole, name), getattr(parts, name)
        torch.testing.assert_close(other.mid, one.mid, rtol=1e-14, atol=1e-14, equal_nan=True)
        torch.testing.assert_close(other.rad, one.rad, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(parts.max_score, whole.max_score, rtol=1e-14, atol=0.0)
    assert torch.equal(parts.empty, whole.empty)


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("peak", [0.0, 3.0, 30.0])
def test_many_distances_are_bounded_closely(
    peak: float, offset: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    scores, value = (
        torch.randn(2, 3, n, 16, generator=generator, dtype=torch.float64) for n in (9, 16)
    )
    weights, value = (peak * scores).softmax(-1), value + offset
    context = weights @ value
    every = weighted_distance(weights, value, context)
    monkeypatch.setattr(bounds, "MOST_DISTANCES", 0)
    bound = weighted_distance(weights, value, context)
    assert (bound >= every).all()
    assert bound.sum() <= (1.3 if peak == 0 else 3) * every.sum() + 1e-8 * offset
    equal = torch.full_like(value, 1 / 3 + offset)
    assert (weighted_distance(weights, equal, equal[:, :, :9]) <= 1e-15 * (1 + offset)).all()


def test_other_casts_may_be_off_by_two_roundoffs() -> None:
    nearest, dropped, single = (
        units_of(torch.bfloat16),
        units_of(torch.bfloat16, Rounding(mode="toward_zero")),
        torch.float32,
    )
    assert dropped.store == pytest.approx(2 * nearest.store)
    assert dropped.subnormal == 2 * nearest.subnormal
    assert (dropped.accumulate, dropped.gamma(9)) == (nearest.accumulate, nearest.gamma(9))
    assert units_of(single, Rounding(mode="toward_zero")) == units_of(single)
    problem = Case(dtype="bfloat16").problem()
    graphs = [
        rounding_graph(problem, Claims(rounding=Rounding(mode=mode)))
        for mode in ("nearest", "stochastic")
    ]
    stochastic = units_of(torch.bfloat16, Rounding(mode="stochastic")).store
    assert graphs[1].store == stochastic > graphs[0].store
    assert 1 + 3 * stochastic >= (1 + dropped.store) ** 3 > 1 + 3 * dropped.store
    with pytest.raises(
        ValueError, match="must be one of 'nearest', 'toward_zero', 'stochastic', but is 'up'"
    ):
        Rounding(mode="up")  # type: ignore[arg-type]  # it must be refused


def test_masked_softmax_of_a_fast_path_may_store_exponentials() -> None:
    # That of torch.nn.MultiheadAttention on the CPU, unlike torch.softmax.
    implementation = resolve("torch_mha")[0].implementation
    problem = Case(n_heads=2, L=32, S=32, dtype="bfloat16", causal=True, inputs="self").problem()
    attention = implementation.build(
        problem.config, problem.weights, dtype=torch.bfloat16, device="cpu"
    ).eval()
    x = problem.query
    with torch.no_grad():
        weights = attention(x, x, x, mask=None, is_causal=True, need_weights=True).weights
    assert ratio(weights, oracle(problem, implementation.claims).weights) <= 1


def test_scores_that_are_stored_before_and_after_they_are_scaled_are_within_the_bound() -> None:
    """On heads that are exact, where no error of a projection hides it."""
    rounding = Rounding(
        softmax_stored=False, scaling_roundings=0, exp_error=4, log_normaliser=False, rescales=0
    )
    precision, tau = Precision.of(torch.bfloat16, rounding), 20**-0.5
    for seed in range(400):
        generator = torch.Generator().manual_seed(seed)
        query, key, value = (
            3 * torch.randn(1, 1, length, 16, generator=generator) for length in (8, 2, 2)
        )
        q, k, v = (x.bfloat16() for x in (query, key, value))
        scores = ((q.float() @ k.float().mT).bfloat16().float() * tau).bfloat16()
        weights = scores.double().softmax(-1).bfloat16()
        heads = Heads(
            *(Ball.exact(x.double()) for x in (q, k, v)), torch.ones(1, 1, 8, 2, dtype=torch.bool)
        )
        expected = attend(heads, tau, precision, "zeros").weights
        assert bool(((weights.double() - expected.mid).abs() <= expected.rad).all()), seed
