"""The bound of gradients: every correct backward pass is within it, small errors are not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.values import make_inputs
from mha.spec import (
    Claims,
    Config,
    Implementation,
    Options,
    Problem,
    Scores,
    Weights,
    gradients,
    oracle,
    sum_shared,
)
from mha.spec.bounds import Ball
from mha.spec.dtypes import TRAITS
from mha.spec.problem import INPUTS
from support.effort import tried
from support.exact_attention import assert_within, mp, solve
from support.random_problems import (
    IMPLEMENTATIONS,
    MUST_EXCEED,
    built,
    moderate_problem,
    one_thread,
    random_case,
    ratio,
)

CASES, SEEDS = tried(24, 60), 12
LOOSE = Claims(masks={"bool", "float"})
CONFIGS = {
    "plain": Config(d_model=15, n_heads=3),
    "one-wide": Config(d_model=3, n_heads=3),
    "kdim-vdim": Config(d_model=10, n_heads=2, kdim=3, vdim=11),
    "two-for-six": Config(d_model=12, n_heads=6, n_kv_heads=2),
    "one-for-two-kdim": Config(d_model=6, n_heads=2, n_kv_heads=1, kdim=5, bias=False),
    "extra-keys": Config(d_model=6, n_heads=2, bias_kv=True, zero_key=True),
    "narrow-heads": Config(d_model=7, n_heads=3, d_head=2, bias="qv"),
    "grouped-wide-heads": Config(d_model=3, n_heads=4, n_kv_heads=2, d_head=3, vdim=2, bias="ko"),
}
# The axes of a mask, for B=2, L=5, S=7, and any H.
SHAPES = ["S", "LS", "L1", "H11", "1L1", "BHLS", "B11S", "B1LS", "BHL1"]

_one_thread = pytest.fixture(autouse=True, scope="module")(one_thread)


def make(
    config: Config, mask: str = "", form: str = "bool", dtype: str = "float64", **call: Any
) -> tuple[Any, Tensor]:
    """A problem, whose mask leaves some rows empty, and the gradient of its output."""
    generator = torch.Generator().manual_seed(11)
    weights, *inputs = make_inputs("normal", config, (2, 5, 7), generator)
    shape = tuple({"B": 2, "H": config.n_heads, "L": 5, "S": 7, "1": 1}[axis] for axis in mask)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    numbers = numbers.masked_fill(numbers < -0.3, -math.inf)
    if len(mask) > 1 and mask[-2] == "L":
        numbers[..., 3, :] = -math.inf
    upstream = torch.randn(inputs[0].shape, generator=generator, dtype=torch.float64)
    numbers, upstream, *inputs = (x.to(getattr(torch, dtype)) for x in (numbers, upstream, *inputs))
    if mask:
        call["mask"] = numbers > -math.inf if form == "bool" else numbers
    return Problem(config, weights.to(upstream.dtype), *inputs).change(**call), upstream


def projected(problem: Problem, items: Any = slice(None), bare: bool = False) -> Iterator[Tensor]:
    """Projected queries, keys and values of some items; bare: keys without their bias."""
    for name in INPUTS:
        weight, bias = (getattr(problem.weights, f"{kind}_{name[0]}") for kind in "wb")
        bias = None if bare and name == "key" else bias
        yield torch.nn.functional.linear(getattr(problem, name)[items], weight, bias)


def score_bias(problem: Problem, claims: Claims) -> Tensor:
    """The numbers added to the scores, (B, H, L, S + extra keys)."""
    bias = torch.zeros(problem.shape, dtype=problem.query.dtype) + leaves(problem).get("mask", 0.0)
    bias = bias.masked_fill(~problem.allowed(claims.causal), -math.inf)
    return torch.nn.functional.pad(bias, (0, problem.config.extra_keys))


def leaves(problem: Problem) -> dict[str, Tensor]:
    """The tensors that have gradients, by name; inputs that are one tensor under the first name."""
    first = {id(getattr(problem, name)): name for name in reversed(INPUTS)}
    named = {name: getattr(problem, name) for name in INPUTS if name in first.values()} | dict(
        problem.weights.named()
    )
    return (
        named
        if problem.mask is None or problem.mask.dtype == torch.bool
        else named | {"mask": problem.mask}
    )


def differentiable(problem: Problem) -> Problem:
    """The same problem in new tensors that require gradients."""
    problem = problem.map_inputs(lambda x: x.detach().clone())
    problem = problem.change(
        **{name: x.clone() for name, x in leaves(problem).items() if name not in INPUTS}
    )
    _ = [x.requires_grad_() for x in leaves(problem).values()]
    return problem


def collected(problem: Problem) -> dict[str, Tensor]:
    """The gradients that backward() left, zeros where it left none."""
    return {
        name: torch.zeros_like(x) if x.grad is None else x.grad
        for name, x in leaves(problem).items()
    }


def split(
    problem: Problem, upstream: Tensor, claims: Claims, bare: bool = False
) -> dict[str, Tensor]:
    """Autograd through the definition, item by item and head by head, and through the maximum."""
    problem = differentiable(problem)
    config, given, bias = problem.config, problem.weights, score_bias(problem, claims)
    width, tau = config.head_dim, claims.scale_for(config.head_dim)
    total = 0 * upstream.sum() if given.b_o is None else (given.b_o * upstream).sum()
    for b, h in product(range(problem.shape[0]), range(config.n_heads)):
        own, kv = (
            slice(n * width, (n + 1) * width) for n in (h, h // (config.n_heads // config.kv_heads))
        )
        q, k, v = (
            x[:, place] for x, place in zip(projected(problem, b, bare), (own, kv, kv), strict=True)
        )
        if config.bias_kv:
            k, v = torch.cat([k, given.extra_k[None, kv]]), torch.cat([v, given.extra_v[None, kv]])
        if config.zero_key:
            k, v = (torch.cat([x, torch.zeros_like(x[:1])]) for x in (k, v))
        some = (bias[b, h] > -math.inf).any(-1)  # a row without a key has no gradient
        scores = (q @ k.T * tau + bias[b, h])[some]
        raised = (scores - scores.amax(-1, keepdim=True)).exp()
        output = raised / raised.sum(-1, keepdim=True) @ v @ given.w_o[:, own].T
        total = total + (output * upstream[b][some]).sum()
    total.backward()
    return collected(problem)


def fused(
    problem: Problem,
    upstream: Tensor,
    claims: Claims,
    defect: str = "",
    eps: float = 0.0,
    bare: bool = False,
) -> dict[str, Tensor]:
    """Tiles of keys, weights from the log-sum-exp; the defect multiplies its place by 1 + eps."""
    problem = differentiable(problem)
    given, heads = problem.weights, (problem.config.n_heads, problem.config.head_dim)
    bias, tau = score_bias(problem, claims), claims.scale_for(heads[1])
    q, k, v = (x.unflatten(-1, heads).transpose(1, 2) for x in projected(problem, bare=bare))
    scores = (tau * q @ k.mT + bias).detach()
    context = (scores.softmax(-1).nan_to_num() @ v).detach().requires_grad_()
    output = torch.nn.functional.linear(context.transpose(1, 2).flatten(2), given.w_o, given.b_o)
    (output * upstream).sum().backward()
    with torch.no_grad():
        dc, lse = context.grad, scores.logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)
        row_sum = (dc * context).sum(-1, keepdim=True) * (1 + eps * (defect == "row sum"))
        if defect == "weight":
            scores.view(-1)[((scores - lse).exp() - 0.5).abs().argmin()] += math.log1p(eps)
        tau *= 1 + eps * (defect == "scale")
        slopes = dq, dk, dv, ds = [torch.zeros_like(x) for x in (q, k, v, bias)]
        for tile in (slice(start, start + 3) for start in range(0, k.shape[2], 3)):
            p = (scores[..., tile] - lse).exp()
            ds[..., tile] = p * (dc @ v[:, :, tile].mT - row_sum)
            dq += tau * (ds[..., tile] @ k[:, :, tile])
            dk[:, :, tile], dv[:, :, tile] = tau * (ds[..., tile].mT @ q), p.mT @ dc
    torch.autograd.backward(
        [q, k, v, bias][: 3 + bias.requires_grad], slopes[: 3 + bias.requires_grad]
    )
    return collected(problem)


def whisper(problem: Problem, upstream: Tensor, claims: Claims) -> dict[str, Tensor]:
    """As transformers' Whisper: keys without a bias, queries that are scaled first, and SDPA."""
    problem = differentiable(problem)
    given, heads = problem.weights, (problem.config.n_heads, problem.config.head_dim)
    q, k, v = (x.unflatten(-1, heads).transpose(1, 2) for x in projected(problem, bare=True))
    bias = score_bias(problem, claims)
    empty = (bias == -math.inf).all(-1, keepdim=True)
    q, mask = q * claims.scale_for(heads[1]), bias.masked_fill(empty, 0.0)
    context = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    context = context.masked_fill(empty, 0.0).transpose(1, 2).flatten(2)
    (torch.nn.functional.linear(context, given.w_o, given.b_o) * upstream).sum().backward()
    return collected(problem)


def adapted(
    implementation: Implementation, problem: Problem, upstream: Tensor, claims: Claims
) -> dict[str, Tensor]:
    """Autograd through an implementation, with the gradients of its layers."""
    problem = differentiable(problem)
    attention, inputs = built(implementation, problem), (problem.query, problem.key, problem.value)
    output = attention(
        *inputs, mask=problem.mask, is_causal=problem.is_causal, need_weights=False
    ).output
    (output * upstream).sum().backward()
    return collected(problem) | attention.weight_gradients()


WITHOUT_KEY_BIAS = {
    "split": partial(split, bare=True),
    "fused": partial(fused, bare=True),
    "whisper": whisper,
}
BACKWARD = {"split": split, "fused": fused}
BACKWARD |= {name: partial(adapted, one) for name, one in IMPLEMENTATIONS.items()}
BACKWARD |= {f"{name}, no key bias": one for name, one in WITHOUT_KEY_BIAS.items()}


def expected_gradients(problem: Problem, upstream: Tensor) -> dict[str, Ball]:
    """The gradients and their bounds; those of inputs that are one tensor are added up."""
    return sum_shared(problem, gradients(problem, LOOSE, upstream))


def worst(got: dict[str, Tensor], expected: Mapping[str, Ball]) -> float:
    """The largest error/bound of all gradients, which must have the expected names and shapes."""
    assert got.keys() == expected.keys()
    assert all(
        got[name].shape == ball.mid.shape == ball.rad.shape for name, ball in expected.items()
    )
    return max(
        (ratio(got[name], ball) for name, ball in expected.items() if ball.mid.numel()), default=0.0
    )


@pytest.mark.parametrize("config", CONFIGS)
def test_configurations(config: str) -> None:
    for is_causal, alignment in product([False, True], ["top_left", "bottom_right"]):
        problem, upstream = make(CONFIGS[config], is_causal=is_causal)
        expected = gradients(problem, claims := replace(LOOSE, causal=alignment), upstream)
        assert worst(split(problem, upstream, claims), expected) < 1
        assert all(
            ball.rad.max() < 2e-11 * ball.mid.abs().max()
            for name, ball in expected.items()
            if name != "b_k"
        )


@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize("shape", SHAPES)
def test_masks(shape: str, form: str) -> None:
    """Empty rows have no gradient; inputs that are one tensor have one together."""
    for dtype, config, is_causal in product(
        MUST_EXCEED, ("plain", "two-for-six", "extra-keys"), [False, True]
    ):
        problem, upstream = make(CONFIGS[config], shape, form, dtype, is_causal=is_causal)
        problem = problem.change(value=problem.key) if config == "plain" else problem
        assert worst(split(problem, upstream, LOOSE), expected_gradients(problem, upstream)) < 1


@pytest.mark.parametrize("scale", [1.0, -0.5, 8.0])
def test_claimed_scale(scale: float) -> None:
    for dtype, config in product(MUST_EXCEED, ("plain", "grouped-wide-heads")):
        problem, upstream = make(CONFIGS[config], "BHLS", "float", dtype)
        expected = gradients(problem, claims := replace(LOOSE, scale=scale), upstream)
        assert worst(split(problem, upstream, claims), expected) < 1
        assert all(expected[name].mid.any() == (scale != 0) for name in ("query", "key"))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("dtype", MUST_EXCEED)
@pytest.mark.parametrize("name", WITHOUT_KEY_BIAS)
def test_keys_may_be_without_their_bias(name: str, dtype: str, seed: int) -> None:
    """With small integers, the bias cancels whole keys, and a bound for one form failed."""
    case = Case(n_heads=9, L=3, S=3, inputs="self", values="integers", dtype=dtype, seed=seed)
    problem = case.problem()
    upstream = torch.randint(-2, 3, problem.query.shape, generator=case.generator).to(problem.query)
    assert (
        worst(
            WITHOUT_KEY_BIAS[name](problem, upstream, LOOSE), expected_gradients(problem, upstream)
        )
        < 1
    )


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        *(
            (name, None)
            for name in (
                "plain",
                "two-for-six",
                "one-for-two-kdim",
                "narrow-heads",
                "grouped-wide-heads",
            )
        ),
        ("plain", -0.7),
        ("narrow-heads", 1.0),
    ],
)
def test_fifty_digits(config: str, scale: float | None) -> None:
    """Plain loops and complex steps: f(x + ih) = f(x) + ih f'(x) to 80 digits, where h = 1e-40."""
    problem, upstream = make(CONFIGS[config], "S")
    claims = replace(LOOSE, scale=scale)
    exact = {
        name: np.vectorize(mp.mpf, otypes=[object])(x.numpy())
        for name, x in leaves(problem).items()
    }
    factors = [mp.mpf(x) for x in upstream.flatten().tolist()]
    for name, ball in gradients(problem, claims, upstream).items():
        for place in random.Random(name).sample(range(exact[name].size), 2):
            moved = exact[name].copy()
            moved.flat[place] += mp.mpc(0, "1e-40")
            output = np.array(
                solve(problem.change(**exact | {name: moved}), claims)["output"]
            ).flatten()
            slope = mp.fdot(output, factors).imag * mp.mpf("1e40")
            assert_within(
                f"{name}[{place}]",
                *(x.flatten()[place].item() for x in (ball.mid, ball.rad)),
                slope,
            )


@pytest.mark.mostly_slow(18)
@pytest.mark.parametrize("dtype", TRAITS)
@pytest.mark.parametrize("name", BACKWARD)
def test_correct_backward_passes_stay_within_the_bound(
    name: str, dtype: str, record_property: Callable[..., None]
) -> None:
    rng, largest = random.Random(20171206), 0.0
    for _ in range(CASES):
        case = random_case(rng, dtype)
        problem = case.problem()
        upstream = torch.randn(problem.query.shape, generator=case.generator).to(
            problem.query.dtype
        )
        largest = max(
            largest,
            worst(BACKWARD[name](problem, upstream, LOOSE), expected_gradients(problem, upstream)),
        )
        assert largest < 1, f"{case!r}: error/bound is {largest}"
    record_property("largest error/bound", largest)
    assert largest > 0


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("dtype", MUST_EXCEED)
@pytest.mark.parametrize("defect", ["scale", "row sum", "weight"])
def test_small_errors_exceed_the_bound(defect: str, dtype: str, seed: int) -> None:
    problem = moderate_problem(seed, dtype, "head_bias")
    upstream = torch.randn(problem.query.shape, generator=torch.Generator().manual_seed(seed)).to(
        problem.query.dtype
    )
    expected = expected_gradients(problem, upstream)
    assert worst(fused(problem, upstream, LOOSE, defect), expected) < 1
    assert worst(fused(problem, upstream, LOOSE, defect, MUST_EXCEED[dtype]), expected) > 1


@pytest.mark.parametrize("dtype", MUST_EXCEED)
@pytest.mark.parametrize("config", ["plain", "two-for-six"])
def test_exact_zeros(config: str, dtype: str) -> None:
    problem, upstream = make(CONFIGS[config], "B11S", "float", dtype)
    problem = problem.change(mask=problem.mask.expand(problem.shape).clone())
    found, masked = gradients(problem, LOOSE, upstream), problem.mask == -math.inf
    assert (found["b_k"].mid.abs() <= found["b_k"].rad).all()
    assert (found["mask"].mid.sum(-1).abs() <= found["mask"].rad.sum(-1)).all()
    for name, where in {"mask": masked, "key": masked[:, 0, 0], "value": masked[:, 0, 0]}.items():
        assert where.any()
        assert not found[name].mid[where].any()
        assert torch.equal(
            found[name].rad.amax(-1) > 0 if where.ndim < 4 else found[name].rad > 0, ~where
        )


@pytest.mark.parametrize("empty_row", ["nan", "uniform", "error"])
def test_policies_do_not_matter_where_empty_rows_are_not_differentiated(empty_row: Any) -> None:
    problem, upstream = make(CONFIGS["plain"], "HLS", "float")
    used = upstream * ~oracle(problem, LOOSE).empty.any(1).unsqueeze(-1)
    found, zeros = (
        gradients(problem, claims, used) for claims in (replace(LOOSE, empty_row=empty_row), LOOSE)
    )
    assert all(
        ball.rad.isfinite().all() and ratio(found[name].mid, ball) < 1
        for name, ball in zeros.items()
    )


@pytest.mark.parametrize(("queries", "keys"), [(0, 7), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(queries: int, keys: int) -> None:
    problem, upstream = make(CONFIGS["plain"])
    problem = problem.change(
        query=problem.query[:, :queries], key=problem.key[:, :keys], value=problem.value[:, :keys]
    )
    found = gradients(problem, LOOSE, upstream[:, :queries])
    assert all(
        not ball.mid.any() and ball.rad.isfinite().all()
        for name, ball in found.items()
        if name != "b_o"
    )


def test_keys_may_be_stored_scaled_below_the_smallest_normal_number() -> None:
    half = torch.float16
    query, key = torch.zeros(1, 1, 4, dtype=half), torch.zeros(1, 2, 4, dtype=half)
    key[:, 0] = 2.0**-24
    value = torch.tensor([[[10.0], [-10.0]]], dtype=half).expand(1, 2, 4).contiguous()
    upstream = torch.full_like(query, 10.0)
    config = Config(d_model=4, n_heads=1, projected=False)
    problem = Problem(config, Weights.random(config, 0, half), query, key, value)
    expected = gradients(problem, Claims(projections=False), upstream)["query"]

    scaled = (problem.scale(Claims()) * key).float().half()
    d_weights = upstream.double() @ value.double().mT
    d_scores = 0.5 * (d_weights - d_weights.mean(-1, keepdim=True))
    found = (d_scores @ scaled.double()).half()

    assert (found != expected.mid.half()).all()
    assert ((found.double() - expected.mid).abs() <= expected.rad).all()


def test_parts_of_a_row_have_gradients_that_cancel() -> None:
    """The part with the smaller scores has a context of -2, and the row almost one of 0."""
    query, key, value = (
        torch.tensor([numbers]).unsqueeze(-1)
        for numbers in ([-2.0, 0.0, -2.0], [-2.0, 0.0, 4.0, 2.0], [0.0, -2.0, 0.0, -2.0])
    )
    key.requires_grad_()
    scores = 3.0 * query @ key.mT
    contexts, sums = [], []
    for part, values in zip(scores.split(2, -1), value.split(2, 1), strict=True):
        contexts.append(part.softmax(-1) @ values)
        sums.append(part.logsumexp(-1, keepdim=True))
    shares = torch.stack(sums).softmax(0)
    output = (shares * torch.stack(contexts)).sum(0)
    upstream = torch.tensor([[[-1.0], [0.0], [2.0]]])
    output.backward(upstream)

    config = Config(d_model=1, n_heads=1, projected=False)
    weights = Weights.random(config, 0, torch.float32)
    problem = Problem(config, weights, query, key.detach(), value, Options(scale=3.0))
    claims = Claims(projections=False, scores=Scores(scale="any"))
    expected = gradients(problem, claims, upstream)["key"]
    assert key.grad is not None
    assert ((key.grad.double() - expected.mid).abs() <= expected.rad).all()
    # Each of them is still known: the smallest is about 1e-20.
    assert (expected.rad[:, [0, 1, 3]] < 1e-2 * expected.mid[:, [0, 1, 3]].abs()).all()
