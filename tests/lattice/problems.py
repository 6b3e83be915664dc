"""Each class against the oracle, without the judge, whose failures are then its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from mha.spec import Claims, Config, Implementation, Problem, Weights, oracle
from mha.spec.scores import Bounds

# B, H, L, S and d_k: all different, twos and ones, and more queries than keys.
SIZES = ((3, 2, 5, 7, 4), (1, 1, 2, 1, 3), (2, 4, 1, 6, 1), (2, 3, 20, 19, 2), (2, 1, 1, 1, 1))


def problems(claims: Claims) -> Iterator[Problem]:
    """Yield small random problems of all claims: sizes, biases, masks, causal calls, empty rows."""
    generator = torch.Generator().manual_seed(0)
    for number, (batch, heads, queries, keys, width) in enumerate(SIZES):
        for bias in sorted(claims.bias, key=str):
            config = _config(claims, heads, width, bias)
            inputs = _inputs(claims, config, batch, queries, keys, generator)
            problem = Problem(config, Weights.random(config, number), *inputs)
            for mask in _masks(claims, problem, generator):
                for causal in _causal(claims):
                    yield problem.change(mask=mask, is_causal=causal)
            for window, causal in product(_windows(claims), _causal(claims)):
                yield problem.change(window=window, is_causal=causal)
            if claims.qk_norm:
                yield _with_small_heads(problem).change(is_causal=claims.always_causal)
    if claims.rotary:
        yield _with_late_positions(claims, generator)


def mismatches(implementation: Implementation) -> list[str]:
    """Return, for each problem that an implementation gets wrong, what is wrong."""
    claims, found = implementation.claims, []
    for problem in problems(claims):
        where = (
            f"{problem.config} {problem.shape} mask={problem.mask is not None}"
            f" causal={problem.is_causal}"
        )
        try:
            found += [f"{where}: {what}" for what in _differences(implementation, problem)]
        except Exception as error:
            found.append(f"{where}: {type(error).__name__}: {error}")
    return found


def _differences(implementation: Implementation, problem: Problem) -> Iterator[str]:
    claims = implementation.claims
    expected = oracle(problem, claims)
    attention = implementation.build(
        problem.config, problem.weights, dtype=torch.float64, device="cpu"
    )
    call = problem.options.change(need_weights=claims.returns_weights).arguments
    if claims.empty_row == "error" and bool(expected.empty.any()):
        try:
            attention.eval()(problem.query, problem.key, problem.value, **call)
        except ValueError:
            return
        yield "an empty row does not raise"
        return
    output, weights, _ = attention.eval()(problem.query, problem.key, problem.value, **call)
    if not _within(output, expected.output.mid, expected.output.rad):
        yield f"the output is off by {(output - expected.output.mid).abs().max():.3g}"
    if claims.returns_weights and not _within(weights, expected.weights.mid, expected.weights.rad):
        yield "the weights are off"


def _within(actual: Tensor | None, value: Tensor, radius: Tensor) -> bool:
    if actual is None or actual.shape != value.shape:
        return False
    return bool((((actual - value).abs() <= radius) | (actual.isnan() & value.isnan())).all())


def _config(claims: Claims, heads: int, width: int, bias: bool | str) -> Config:
    if claims.rotary and heads == 2:
        width = 2 * claims.sizes.head_dim_multiple  # two pairs, or more, of two frequencies
    width = claims.sizes.fit_head_dim(width)
    config = Config(
        d_model=heads * width, n_heads=heads, bias=bias, norm_weights=claims.norm_weights
    )
    if claims.grouped_query and heads % 2 == 0:
        config = replace(config, n_kv_heads=heads // 2)
    if claims.own_head_dim and heads != 3:
        return replace(config, d_head=claims.sizes.fit_head_dim(width + 1))
    return config


def _inputs(
    claims: Claims, config: Config, batch: int, queries: int, keys: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    def draw(length: int) -> Tensor:
        return torch.randn(batch, length, config.d_model, generator=generator, dtype=torch.float64)

    query, key, value = draw(queries), draw(keys), draw(keys)
    if claims.cross_attention == "memory":
        return query, key, key
    return (query, key, value) if claims.cross_attention else (query, query, query)


def _masks(claims: Claims, problem: Problem, generator: torch.Generator) -> Iterator[Tensor | None]:
    """Yield no mask, masks of keys, and masks along every claimed axis, some with empty rows."""
    yield None
    differs = claims.per_item_mask, claims.per_head_mask, claims.per_query_mask, True
    shape = tuple(size if free else 1 for size, free in zip(problem.shape, differs, strict=True))
    for sizes, probability in (((shape[0], 1, 1, shape[3]), 0.6), (shape, 0.7), (shape, 0.3)):
        allowed = torch.rand(sizes, generator=generator) < probability
        if not claims.joint_masks:
            allowed = allowed[:, :, :1] & allowed[:1]
        if "bool" in claims.masks:
            yield allowed
        if "float" in claims.masks:
            numbers = torch.randn(sizes, generator=generator, dtype=torch.float64)
            yield numbers.masked_fill(~allowed, float("-inf"))


def _windows(claims: Claims) -> list[Bounds]:
    """Return a few windows, in the form that is claimed."""
    window = claims.scores.window
    if window is None:
        return []
    return [window.nearest(bounds) for bounds in ((0, 0), (2, 1), (None, 1))]


def _with_small_heads(problem: Problem) -> Problem:
    """Return a problem whose queries and keys are so small that the eps of a norm shows."""
    small = dict[str, Tensor]()
    for name, tensor in problem.weights.named():
        if name in ("w_q", "b_q", "w_k", "b_k"):
            small[name] = tensor * 1e-3
    return replace(problem, weights=replace(problem.weights, **small))


def _with_late_positions(claims: Claims, generator: torch.Generator) -> Problem:
    """Return a problem whose last positions show frequencies and positions that are rounded.

    It has 300 positions, since 257 is 256 in bfloat16; and four pairs of columns, since the
    frequency of the first one is 1, and the last ones turn too slowly.
    """
    assert claims.rotary
    config = _config(claims, 1, round(8 / claims.rotary.part), max(claims.bias, key=str))
    inputs = _inputs(claims, config, 1, 300, 300, generator)
    problem = Problem(config, Weights.random(config, 0), *inputs)
    return problem.change(is_causal=claims.always_causal)


def _causal(claims: Claims) -> tuple[bool, ...]:
    if claims.always_causal:
        return (True,)
    return (False, True) if claims.causal else (False,)
