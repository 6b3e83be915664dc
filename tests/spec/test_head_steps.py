"""Norms and rotations of queries and keys: the oracle beside a formula of its own, and bounds."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mha.implementations.formula import normed
from mha.spec import (
    Claims,
    Config,
    Problem,
    QkNorm,
    Rotary,
    Scores,
    Sizes,
    Weights,
    gradients,
    oracle,
)
from mha.spec.bounds import Ball
from mha.spec.head_steps import Norm
from mha.spec.rotation import Sized
from mha.spec.units import units_of
from support.effort import tried

HALVES, NEIGHBOURS = Rotary(), Rotary(500000.0, "interleaved", part=0.5)
CHANGES: list[dict[str, Any]] = [
    {"rotary": HALVES},
    {"rotary": NEIGHBOURS},
    {"rotary": replace(HALVES, factor=4.0)},
    {"rotary": replace(HALVES, stretch=8.0)},
    {"rotary": replace(HALVES, direction="backward"), "qk_norm": QkNorm(weight=None)},
    {"qk_norm": QkNorm("layer", eps=1e-5)},
    {"qk_norm": QkNorm("l2", eps=1e-24, weight=None), "rotary": NEIGHBOURS},
    {"qk_norm": QkNorm("unit_rms", eps=1e-24, weight=None), "rotary": NEIGHBOURS},
    {"qk_norm": QkNorm("unit_rms", "width", eps=1e-24), "rotary": HALVES},
    {"qk_norm": QkNorm("layer", "width", weight="offset"), "rotary": NEIGHBOURS},
    {"qk_norm": QkNorm("rms", "width"), "rotary": HALVES},
    {"qk_norm": QkNorm("rms", before_rotary=False), "rotary": HALVES},
]
DTYPES = {"float64": 1e-5, "float32": 1.0, "bfloat16": 1.0}


def by_position(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate (B, heads, L, d_k) by loops over positions and pairs."""
    turned, width = x.clone(), rotary.width(x.shape[-1])
    base = rotary.base
    if rotary.stretch != 1:
        base *= rotary.stretch ** (width / (width - 2))
    for position, pair in product(range(x.shape[2]), range(width // 2)):
        angle = position / rotary.factor * base ** (-2 * pair / width)
        if rotary.direction == "backward":
            angle = -angle
        one, other = pair, pair + width // 2
        if rotary.pairs == "interleaved":
            one, other = 2 * pair, 2 * pair + 1
        cos, sin = math.cos(angle), math.sin(angle)
        a, b = x[:, :, position, one], x[:, :, position, other]
        turned[:, :, position, one] = a * cos - b * sin
        turned[:, :, position, other] = b * cos + a * sin
    return turned


def divided(x: Tensor, norm: QkNorm, weight: Tensor | None) -> Tensor:
    """Norm (B, heads, L, d_k) by functions of torch."""
    batch, heads, length, width = x.shape
    if norm.over == "width":
        x = x.transpose(1, 2).flatten(2)
    scale = weight
    if weight is not None and norm.weight == "offset":
        scale = 1 + weight
    if norm.kind == "l2":
        x = F.normalize(x, dim=-1)
    elif norm.kind == "unit_rms":
        x = F.normalize(x, dim=-1) * x.shape[-1] ** 0.5
        x = x if scale is None else x * scale
    elif norm.kind == "rms":
        x = F.rms_norm(x, x.shape[-1:], scale, norm.eps_for(x.dtype))
    else:
        x = F.layer_norm(x, x.shape[-1:], scale, None, norm.eps_for(x.dtype))
    if norm.over == "head":
        return x
    return x.view(batch, length, heads, width).transpose(1, 2)


def attention(problem: Problem, claims: Claims) -> Tensor:
    """Return the output by a formula that shares nothing with the oracle."""

    def heads(x: Tensor, role: str) -> Tensor:
        split = F.linear(x, *problem.weights.of(role)).unflatten(-1, (-1, problem.config.head_dim))
        x = split.transpose(1, 2)
        weight = getattr(problem.weights, f"{role}_norm", None)
        norm, rotary = (claims.qk_norm, claims.rotary) if role != "v" else (None, None)
        if norm and norm.before_rotary:
            x = divided(x, norm, weight)
        if rotary:
            x = by_position(x, rotary)
        if norm and not norm.before_rotary:
            x = divided(x, norm, weight)
        return x.repeat_interleave(problem.config.n_heads // x.shape[1], 1)

    q, k, v = heads(problem.query, "q"), heads(problem.key, "k"), heads(problem.value, "v")
    scores = q @ k.mT * problem.config.head_dim**-0.5
    if problem.options.sinks is not None:
        sinks = torch.tensor(problem.options.sinks, dtype=scores.dtype).view(-1, 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return F.linear((weights @ v).transpose(1, 2).flatten(2), *problem.weights.of("o"))


def leaves_of(claims: Claims, dtype: torch.dtype) -> tuple[Problem, dict[str, Tensor]]:
    """Return a problem of two items, and all its tensors, which require a gradient."""
    config = Config(24, 3, n_kv_heads=1, norm_weights=claims.norm_weights)
    generator = torch.Generator().manual_seed(1)
    named = {
        name: torch.randn(2, length, 24, generator=generator).to(dtype)
        for name, length in (("query", 5), ("key", 7), ("value", 7))
    }
    named |= {name: x.to(dtype) for name, x in Weights.random(config, 2, torch.float64).named()}
    for x in named.values():
        x.requires_grad_()
    inputs = {name: named[name] for name in ("query", "key", "value")}
    weights = {name: x for name, x in named.items() if name not in inputs}
    return Problem(config, Weights(**weights), **inputs), named


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_gradients_are_within_the_bound(dtype: str, changes: dict[str, Any]) -> None:
    claims = Claims(grouped_query=True, **changes)
    problem, named = leaves_of(claims, getattr(torch, dtype))
    output, expected = attention(problem, claims), oracle(problem, claims)
    upstream = torch.ones_like(output)
    output.backward(upstream)
    balls = gradients(problem, claims, upstream) | {"output": expected.output}
    found = {name: x.grad for name, x in named.items()} | {"output": output.detach()}
    assert set(balls) == set(found)
    for name, ball in balls.items():
        error = (found[name].double() - ball.mid).abs()  # type: ignore[union-attr]  # each has one
        # In float64, steps may be in float32, but are not here.
        assert bool((error <= DTYPES[dtype] * ball.rad + 1e-12).all()), name


def test_key_of_a_sink_passes_through_no_step() -> None:
    claims = Claims(
        grouped_query=True, rotary=HALVES, qk_norm=QkNorm(), scores=Scores(sinks="input")
    )
    problem, named = leaves_of(claims, torch.float64)
    problem = problem.change(sinks=(0.5, -1.0, 2.0))
    output = attention(problem, claims)
    upstream = torch.ones_like(output)
    output.backward(upstream)
    balls = gradients(problem, claims, upstream)
    for name, x in named.items():
        error = (x.grad - balls[name].mid).abs()  # type: ignore[operator]  # each has one
        assert bool((error <= 1e-5 * balls[name].rad + 1e-12).all()), name


def test_bound_rejects_small_changes_in_single_precision() -> None:
    claims = Claims(rotary=HALVES, qk_norm=QkNorm())
    problem, _ = leaves_of(replace(claims, grouped_query=True), torch.float32)
    right = oracle(problem, claims).output
    for other in (
        replace(claims, rotary=replace(HALVES, base=11000.0)),
        replace(claims, qk_norm=QkNorm(eps=1e-2)),
    ):
        wrong = oracle(problem, other).output
        assert bool(((wrong.mid - right.mid).abs() > 2 * right.rad).any())


def test_places_are_those_of_a_longer_problem() -> None:
    claims = Claims(rotary=HALVES, causal=None)
    problem, _ = leaves_of(claims, torch.float64)
    rows = torch.tensor([1, 4])
    some = problem.change(query=problem.query[:, rows], places=rows)
    whole = oracle(problem, claims).output.mid[:, rows]
    torch.testing.assert_close(oracle(some, claims).output.mid, whole)


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ({"rotary": HALVES, "projections": False}, "rotary comes after projections"),
        ({"qk_norm": QkNorm(), "extras": {"zero_key"}}, "which have no position"),
        ({"rotary": True}, "must be a Rotary"),
    ],
)
def test_claims_that_contradict_each_other_are_refused(claims: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Claims(**claims)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rotary(base=1.0), "above 1"),
        (lambda: Rotary(part=0.0), "above 0"),
        (lambda: Rotary(factor=0.0), "factor must be a positive number, but is 0.0"),
        (lambda: Rotary(stretch=math.inf), "stretch must be a positive number"),
        (lambda: Rotary(pairs="thirds"), "must be one of 'half', 'interleaved'"),  # type: ignore[arg-type]  # it is refused
        (lambda: QkNorm(eps=0.0), "must be positive"),
        (lambda: QkNorm(weight="bias"), "one of 'scale', 'offset' or None"),  # type: ignore[arg-type]  # it is refused
    ],
)
def test_words_and_numbers_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_widths_have_whole_pairs_of_columns() -> None:
    assert Claims(rotary=Rotary(part=0.25)).sizes.head_dim_multiple == 8
    assert Claims(rotary=Rotary(part=0.25, stretch=2.0)).sizes.head_dim_multiple == 16
    claimed = Claims(rotary=HALVES, sizes=Sizes(head_dim_multiple=3))
    assert claimed.sizes.head_dim_multiple == 6


@pytest.mark.skipif(tried(0, 1) == 0, reason="`make lattice` tries more problems")
@pytest.mark.parametrize("seed", range(20))
def test_bound_covers_large_and_small_numbers(seed: int) -> None:
    for changes, factor in product(CHANGES, (1e-3, 1.0, 30.0)):
        claims = Claims(grouped_query=True, **changes)
        problem, _ = leaves_of(claims, torch.float32)
        generator = torch.Generator().manual_seed(seed)
        query = factor * torch.randn(problem.query.shape, generator=generator)
        problem = problem.change(query=query)
        output, expected = attention(problem, claims).detach(), oracle(problem, claims).output
        assert bool(((output.double() - expected.mid).abs() <= expected.rad).all())


@pytest.mark.parametrize(
    ("norm", "count"),
    [
        (QkNorm(), False),
        (QkNorm(weight=None, before_rotary=False), False),
        (QkNorm(before_rotary=False), True),
        (QkNorm("layer", weight=None, before_rotary=False), True),
    ],
    ids=str,
)
def test_places_count_where_a_rotation_is_normed_by_column(norm: QkNorm, count: bool) -> None:
    claims = Claims(rotary=HALVES, qk_norm=norm, grouped_query=True)
    problem, _ = leaves_of(claims, torch.float64)
    moved = problem.map_inputs(lambda x: torch.cat([x[:, :3], x], 1))
    is_hidden = torch.arange(moved.key.shape[1]) < 3
    moved = moved.change(mask=~is_hidden.view(1, 1, 1, -1))
    first, second = oracle(problem, claims).output.mid, oracle(moved, claims).output.mid[:, 3:]
    assert norm.places_count is count
    assert torch.allclose(first, second, atol=1e-9) is not count


def test_length_below_the_least_one_is_that_and_does_not_change() -> None:
    norm = QkNorm("l2", eps=1e-24, weight=None)
    x = torch.tensor([[3e-13, 4e-13, 0.0], [3e-5, 4e-5, 0.0]], dtype=torch.float64)
    x = x.view(1, 1, 2, 3).requires_grad_()
    upstream = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64).expand_as(x)
    (gradient,) = torch.autograd.grad(F.normalize(x, dim=-1), x, upstream)
    step = Norm.of(norm, None, 3, norm.eps_for(x.dtype), units_of(torch.float64))
    torch.testing.assert_close(step.exact(x), F.normalize(x, dim=-1))
    torch.testing.assert_close(normed(x, norm, None), F.normalize(x, dim=-1))
    torch.testing.assert_close(step.pulled_back(x, upstream), gradient)
    exact = Ball.exact(x.detach())
    back, _ = step.backward(exact, Sized(Ball.exact(upstream), upstream.abs()))
    torch.testing.assert_close(back.ball.mid, gradient)


@pytest.mark.parametrize("gain", [None, 1 / 16])
def test_quotients_may_underflow_before_the_product_with_the_root_of_the_width(
    gain: float | None,
) -> None:
    """In float16, small columns of `F.normalize(x) * gain * 8` are within the bound."""
    weight = None if gain is None else torch.full((64,), gain).half()
    norm = QkNorm("unit_rms", eps=1e-24, weight=None if gain is None else "scale")
    x = torch.ones(1, 1, 200, 64).half()
    x[..., 1:8] = 1.37
    x[0, 0, :, 63] = torch.arange(200) * 2.0**-24
    found = F.normalize(x, dim=-1)
    if weight is not None:
        found = found * weight
    found = 8 * found
    of_heads = Norm.of(norm, weight, 64, 1e-24, units_of(torch.float16))
    expected = of_heads.forward(Ball.exact(x.double()))
    assert bool(((found.double() - expected.mid).abs() <= expected.rad).all())
    assert float(expected.rad.max()) < 0.01  # and no larger than is needed
