"""The directed test: correct results stay below the threshold, small defects do not."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from mha.conformance import check
from mha.conformance.cases.case import Case
from mha.conformance.faults.base import Complete, implementation_of
from mha.conformance.faults.directed import CastsTruncate, LateValuesLost, ScaleOffInHalf
from mha.conformance.faults.float8 import IN_FLOAT8, HeadsInFloat8
from mha.implementations import resolve
from mha.spec import Claims, Config, Options, Problem, Rounding, Weights, heads, oracle
from mha.spec.bounds import Units, units_of
from mha.spec.directed import LAMBDA, Allowance, allowance, allowances, projection
from mha.spec.rounding_graph import RoundingGraph, rounding_graph
from support import variants
from support.directed_cases import hostile_problem
from support.effort import tried
from support.exact_attention import solve
from support.random_problems import built, one_thread
from support.random_roundings import (
    PROFILES,
    Rounded,
    random_direction,
    random_projections,
    small_problem,
)

_one_thread = pytest.fixture(autouse=True, scope="module")(one_thread)


def of_scale(graph: RoundingGraph) -> Tensor:
    """The derivative of the output with respect to the logarithm of the scale."""
    s, p = graph.scores, graph.weights
    context = (p * (s - (p * s).sum(-1, keepdim=True))) @ graph.value
    return context.transpose(1, 2).flatten(2) @ graph.w_o.T


def single(graph: RoundingGraph, place: int) -> Tensor:
    """The direction of one element."""
    direction = torch.zeros_like(graph.output).flatten()
    direction[place] = 1.0
    return direction.view_as(graph.output)


@pytest.mark.parametrize("profile", PROFILES)
def test_backward_pass_is_that_of_autograd(profile: str) -> None:
    problem, rounding = small_problem(), PROFILES[profile]
    graph = rounding_graph(problem, Claims(rounding=rounding))
    direction, u = random_direction(graph), units_of(torch.float16).store
    squares, totals = [], []
    for summed in (False, True):
        deltas: list[Tensor] = []

        def draw(x: Tensor, deltas: list[Tensor] = deltas) -> Tensor:
            deltas.append(torch.zeros_like(x, requires_grad=True))
            return deltas[-1]

        (Rounded(problem, rounding, draw, summed)() * direction).sum().backward()
        each = torch.cat([delta.grad.flatten() for delta in deltas if delta.grad is not None])
        # The largest exponential of a row is 1, exactly.
        exact = (
            _of_largest_exponentials(graph, direction)
            if rounding.softmax_stored
            else torch.zeros(1).double()
        )
        squares.append(float(each.square().sum() - exact.square().sum()))
        totals.append(float(each.abs().sum() - exact.abs().sum()))
    part = allowance(graph, direction)
    assert part.sd == pytest.approx(u * max(squares) ** 0.5, rel=1e-9)
    assert part.worst == pytest.approx(u * max(totals), rel=1e-9)


def _of_largest_exponentials(graph: RoundingGraph, direction: Tensor) -> Tensor:
    """g_k x_k of the largest exponential of each row."""
    largest = graph.scores == graph.scores.amax(-1, keepdim=True)
    moved: Tensor = graph.gradients(direction)["score"][0][0][largest]
    return moved


@pytest.mark.parametrize("role", "qkvo")
def test_backward_pass_agrees_with_differences_at_50_digits(role: str) -> None:
    problem, step = small_problem(bias=True, d_model=4), 2.0**-9
    graph = rounding_graph(problem, Claims())
    direction = random_direction(graph)
    place = {"q": "query", "k": "key", "v": "value", "o": "output"}[role]
    ((gradient,),) = graph.gradients(direction)[place]
    by_column = gradient.sum((0, 1)) if role == "o" else gradient.sum((0, 2)).flatten()
    bias = getattr(problem.weights, f"b_{role}").double()
    for column in range(len(bias)):
        sides = []
        for side in (step, -step):
            moved = bias.clone()
            moved[column] += side
            solved = solve(problem.change(**{f"b_{role}": moved}), Claims())["output"]
            output = torch.from_numpy(np.array(solved, dtype=float)).float()
            sides.append(float((output * direction).sum()))
        difference = (sides[0] - sides[1]) / (2 * step)
        assert float(by_column[column]) == pytest.approx(
            difference, abs=1e-4 * (1 + float(by_column.abs().max()))
        )


@pytest.mark.parametrize("profile", PROFILES)
def test_random_roundings_stay_below_the_threshold_and_hoeffdings_tail(profile: str) -> None:
    draws = 4000
    distance, part = random_projections(profile, draws)
    assert distance.max() * part.sd <= part.threshold
    assert 0.9 < distance.square().mean().sqrt() < 1.1
    for length in (1.0, 2.0, 3.0):
        likely = 2 * math.exp(-(length**2) / 2)
        assert (distance > length).double().mean() <= likely + 4 * math.sqrt(likely / draws)


def stored_radius(problem: Problem, claims: Claims, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The part of the oracle's radius that stores make, to first order."""
    step, zero = 1e-9, 1e-300
    units = Units(accumulate=zero, store=step, subnormal=0.0, flush=zero, largest=math.inf)
    with monkeypatch.context() as patched:
        patched.setattr(heads, "units_of", lambda dtype, mode: units)
        radius: Tensor = (
            oracle(problem, claims).output.rad / step * units_of(problem.query.dtype).store
        )
    return radius


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("profile", PROFILES)
def test_single_elements_reach_what_stores_add_to_the_bound(
    profile: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one channel, and two keys of opposite signs, no errors cancel that the bound adds up."""
    claims, one = Claims(rounding=PROFILES[profile]), torch.ones(1, 1)
    given = Weights(
        one, -1.5 * one, 0.75 * one, 1.25 * one, *([torch.tensor([0.25])] * 4 if bias else [])
    )
    query, key = (
        torch.tensor(row).reshape(1, -1, 1).bfloat16() for row in ([0.5, -1.5, 2.0], [-1.0, 1.25])
    )
    config = Config(d_model=1, n_heads=1, bias=bias)
    problem = Problem(
        config, given.to(torch.bfloat16), query, key, torch.tensor([[[8.0], [7.0]]]).bfloat16()
    )
    graph, radius = rounding_graph(problem, claims), stored_radius(problem, claims, monkeypatch)
    for place in range(3):
        direction = single(graph, place)
        part = allowance(graph, direction)
        # The bound does not use that the largest exponential of a row is 1, exactly.
        exact = (
            float(_of_largest_exponentials(graph, direction).abs().sum())
            if claims.rounding.softmax_stored
            else 0.0
        )
        reached = part.worst + part.systematic + graph.store * exact
        assert (1 - 1e-6) * float(radius.flatten()[place]) <= reached
        # Nothing that the bound does not allow, either: at most one more rounding of the scores.
        assert part.worst <= 1.5 * float(radius.flatten()[place])


def directions(graph: RoundingGraph, seed: int) -> list[Tensor]:
    """Derivatives, one row, one element, and a random direction."""
    drawn = random_direction(graph, seed)
    row = torch.zeros_like(drawn)
    row[:, seed % row.shape[1]] = drawn[:, 0]
    return [of_scale(graph), graph.output, drawn, row, single(graph, seed % graph.output.numel())]


# Of each correct implementation.
PROBLEMS = tried(24, 56)
NAMES = ("loop", "einops", "fused_qkv", "tiled", "sdpa", "torch_mha")
CORRECT = {name: resolve(name)[0].implementation for name in NAMES}
CORRECT |= {
    cls.__name__: implementation_of(cls) for cls in (Complete, variants.NoKeyBias, variants.BaseTwo)
}
CORRECT["HeadsInFloat8"] = implementation_of(HeadsInFloat8, IN_FLOAT8)


@cache
def hostile(
    seed: int, rounding: Rounding, own: bool
) -> tuple[Problem, RoundingGraph, list[tuple[Tensor, Allowance]]]:
    """A hostile problem, its graph, and directions with allowances; own: without a mask."""
    problem = hostile_problem(random.Random(seed), seed)
    if own:
        problem = problem.change(key=problem.query, value=problem.query, mask=None)
    graph = rounding_graph(problem, Claims(rounding=rounding))
    found = list(directions(graph, seed))
    parts = zip(found, allowances(graph, found), strict=True)
    return (
        problem,
        graph,
        [(direction, part) for direction, part in parts if part.size and part.deviation <= 0.25],
    )


@torch.no_grad()
@pytest.mark.parametrize("name", CORRECT)
def test_no_correct_implementation_exceeds_the_threshold(
    name: str, record_property: Callable[..., None]
) -> None:
    implementation, ratios = CORRECT[name], []
    for seed in range(PROBLEMS):
        problem, graph, parts = hostile(seed, implementation.claims.rounding, name == "fused_qkv")
        called, given = built(implementation, problem), (problem.query, problem.key, problem.value)
        output = called(
            *given, mask=problem.mask, is_causal=problem.is_causal, need_weights=False
        ).output
        ratios += [
            abs(projection(graph, output, direction)) / part.threshold for direction, part in parts
        ]
    record_property("largest ratio to the threshold", max(ratios))
    assert len(ratios) > 2.5 * PROBLEMS
    assert 0 < max(ratios) < 0.6


class OfAnotherScale(Complete):
    """Scores that are a little too large."""

    factor = 1.0

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * self.factor


def scale_ratio(dtype: str, factor: float, sizes: dict[str, int], seed: int) -> float:
    """|T| over the threshold of a scale that is wrong by a factor."""
    problem = Case(dtype=dtype, seed=seed, **sizes).problem()
    implementation = implementation_of(type("Scaled", (OfAnotherScale,), {"factor": factor}))
    # In float32, so that no store but the last can hide the factor or add to it.
    wide = problem.change(weights=problem.weights.to(torch.float32)).map_inputs(lambda x: x.float())
    with torch.no_grad():
        output = built(implementation, wide)(wide.query, wide.key, wide.value).output.to(
            problem.query
        )
    graph = rounding_graph(
        problem, replace(implementation.claims, rounding=Rounding(softmax_stored=False))
    )
    direction = of_scale(graph)
    part = allowance(graph, direction)
    assert part.is_informative
    return abs(projection(graph, output, direction)) / part.threshold


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("dtype", "error"),
    [("bfloat16", 0.01), ("float16", 0.003), ("bfloat16", 0.05), ("float16", 0.05)],
)
def test_small_errors_of_the_scale_exceed_the_threshold(
    dtype: str, error: float, seed: int
) -> None:
    sizes = {"B": 2, "n_heads": 4, "L": 64, "S": 64, "head_dim": 32}
    assert scale_ratio(dtype, 1.0, sizes, seed) < 0.5
    assert scale_ratio(dtype, 1 + error, sizes, seed) > 1
    assert scale_ratio(dtype, 1 - error, sizes, seed) > 1


@pytest.mark.parametrize("times", [2, 16])
def test_equal_numbers_round_alike(times: int) -> None:
    problem = Case(n_heads=2, head_dim=16, B=1, L=5, S=7, dtype="bfloat16", seed=1).problem()
    graph = rounding_graph(problem, Claims())
    direction = random_direction(graph)
    once = allowance(graph, direction)
    repeated = problem.change(query=problem.query.repeat(1, times, 1))
    expanded = problem.map_inputs(lambda x: x.repeat(times, 1, 1))
    for other, along in (
        (repeated, direction.repeat(1, times, 1)),
        (expanded, direction.repeat(times, 1, 1)),
    ):
        part = allowance(rounding_graph(other, Claims()), along)
        assert part.sd == pytest.approx(times * once.sd, rel=1e-6)
        assert part.worst == pytest.approx(times * once.worst, rel=1e-6)
        assert part.common == pytest.approx(times * once.common, rel=1e-6)


def test_rows_without_a_key_have_no_part() -> None:
    problem = Case(
        n_heads=2, head_dim=8, B=2, L=7, S=8, mask="empty_rows", dtype="bfloat16"
    ).problem()
    graph = rounding_graph(problem, Claims(empty_row="nan"))
    assert 0 < graph.known.sum() < graph.known.numel()
    spoilt = graph.output.masked_fill(~graph.known, math.nan)
    assert projection(graph, spoilt, torch.ones_like(spoilt)) == 0
    part = allowance(graph, torch.ones_like(spoilt))
    assert part.size == 16 * int(graph.known.sum())
    assert math.isfinite(part.threshold)


@pytest.mark.parametrize("values", ["heavy", "large"])
def test_large_scores_say_nothing(values: str) -> None:
    problem = Case(
        n_heads=2, head_dim=16, B=2, L=17, S=17, values=values, dtype="bfloat16"
    ).problem()
    graph = rounding_graph(problem, Claims())
    assert not allowance(graph, of_scale(graph)).is_informative


def test_small_directions_and_overflow_say_nothing() -> None:
    problem = Case(n_heads=1, head_dim=16, B=2, L=9, S=9, dtype="float16").problem()
    graph = rounding_graph(problem, Claims())
    assert not allowance(graph, 1e-3 * single(graph, 0)).is_informative
    graph = rounding_graph(
        problem.change(query=2000 * problem.query, key=2000 * problem.key), Claims()
    )
    assert not allowance(graph, graph.output).is_informative


def test_extra_keys_and_a_float_mask_have_their_places() -> None:
    config = Config(d_model=8, n_heads=2, bias_kv=True, zero_key=True)
    generator = torch.Generator().manual_seed(0)
    x, mask = (
        torch.randn(2, 5, 8, generator=generator).half(),
        torch.randn(5, 5, generator=generator),
    )
    problem = Problem(config, Weights.random(config, 0, torch.float16), x, x, x, Options(mask))
    graph = rounding_graph(problem, Claims())
    expected = oracle(problem, Claims())
    torch.testing.assert_close(graph.output, expected.output.mid, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(graph.weights, expected.weights.mid, rtol=1e-12, atol=1e-12)
    assert (
        allowance(graph, graph.output).sd
        > allowance(rounding_graph(problem.change(mask=mask.half()), Claims()), graph.output).sd
    )


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_of_a_kernel_over_ranks_are_not_added_up(bias: bool) -> None:
    config, x = Config(d_model=6, n_heads=2, bias=bias), torch.ones(1, 3, 6).bfloat16()
    problem = Problem(config, Weights.random(config, 0, x.dtype), x, x, x).of_heads()
    graph = rounding_graph(problem, Claims(rounding=Rounding(ranks=3)))
    assert "output" not in graph.places
    # The contexts themselves, and 2 (ranks - 1) partial ones
    assert sum(times for times, _ in graph.places["context"].moves) == 1 + 4


def test_wide_dtypes_have_no_graph() -> None:
    with pytest.raises(ValueError, match=r"half precision, not for torch\.float32"):
        rounding_graph(Case().problem(), Claims())


def test_threshold_is_never_more_than_the_worst_case() -> None:
    part = Allowance(
        size=4.0, sd=1.0, worst=2.0, systematic=0.5, common=0.25, second_order=0.125, deviation=0.0
    )
    assert part.threshold == 2.875 < LAMBDA


@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            ScaleOffInHalf,
            (
                r"the scores were (0\.9|1\.[01])\d% \(.*\) too large; rounding explains 0\.\d\d% at"
                r" most"
            ),
        ),
        (
            CastsTruncate,
            r"the weights were 0\.[56]\d% \(.*\) too small; rounding explains 0\.\d\d% at most",
        ),
        (LateValuesLost, r"1[456](\.\d)?% \(.*\) of the mean value were subtracted"),
    ],
)
def test_message_says_how_much_of_which_defect_there_is(
    fault: type[Complete], message: str
) -> None:
    report = check(implementation_of(fault), "quick", clauses=["NUM-7"], dtypes=["bfloat16"])
    assert re.search(message, report.verdicts[0].message)


@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize(
    ("dim", "part", "place"),
    [
        (0, slice(1, 2), "item 1"),
        (1, slice(2, 3), "head 2"),
        (2, slice(16, 32), "queries 16 to 31"),
    ],
)
def test_message_says_where_a_defect_is(dim: int, part: slice, place: str) -> None:
    class PartOff(Complete):
        def score(self, q: Tensor, k: Tensor) -> Tensor:
            scores = super().score(q, k).clone()
            scores[(*(slice(None),) * dim, part)] *= 1.1
            return scores

    report = check(implementation_of(PartOff), "quick", clauses=["NUM-7"], dtypes=["bfloat16"])
    assert f"too large in {place}; rounding explains" in report.verdicts[0].message


@pytest.mark.usefixtures("undiagnosed")
def test_a_row_that_is_not_finite_fails() -> None:
    class NanRow(Complete):
        def merge(self, x: Tensor) -> Tensor:
            return (
                super().merge(x)
                * torch.where(torch.arange(x.shape[2]) == 3, math.nan, 1.0).to(x)[:, None]
            )

    report = check(implementation_of(NanRow), "quick", clauses=["NUM-7"], dtypes=["bfloat16"])
    assert not report.conforms
