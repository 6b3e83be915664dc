"""The oracle against plain loops at 50 digits, which take from torch only the stored numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from mpmath.ctx_mp import MPContext
from torch import Tensor

from mha.conformance.cases.values import VALUES, make_inputs
from mha.spec import Claims, Config, Problem, oracle
from mha.spec.claims import Alignment

mp = MPContext()
mp.dps = 50

# A radius above this part of the largest value, and above this number, would let a wrong value pass.
INFORMATIVE, TINY = 1e-8, 1e-290
PLAIN = Config(d_model=15, n_heads=3)
CONFIGS = {
    "plain": PLAIN,
    "no-bias": Config(d_model=15, n_heads=3, bias=False),
    "smallest": Config(d_model=1, n_heads=1),
    "kdim-vdim": Config(d_model=10, n_heads=2, kdim=3, vdim=11),
    "two-for-four": Config(d_model=12, n_heads=4, n_kv_heads=2),
    "two-for-six": Config(d_model=12, n_heads=6, n_kv_heads=2),
    "three-for-six": Config(d_model=12, n_heads=6, n_kv_heads=3, bias=False),
    "one-for-three": Config(d_model=15, n_heads=3, n_kv_heads=1),
    "grouped-kdim-vdim": Config(d_model=12, n_heads=4, n_kv_heads=2, kdim=5, vdim=7),
}
# B, L, S
LENGTHS = [(2, 5, 7), (2, 7, 7), (2, 7, 5), (2, 1, 7), (2, 7, 1), (1, 1, 1)]
NARROW = Config(d_model=3, n_heads=3)
# For B=2, H=3, L=5, S=7: each way to leave axes out or at 1.
MASKS = [(7,), (1,), (5, 7), (5, 1), (3, 5, 7), (3, 1, 1), (1, 1, 1, 7), (2, 1, 1, 7), (1, 1, 5, 7)]
MASKS += [(2, 1, 5, 7), (1, 3, 5, 7), (2, 3, 1, 7), (2, 1, 5, 1), (2, 3, 5, 7)]
ALIGNMENTS: tuple[Alignment, ...] = ("top_left", "bottom_right")
EMPTY_ROWS = ("zeros", "nan", "uniform")

Sizes = tuple[int, int, int]
Matrix = list[list[Any]]


def exact(numbers: Any) -> Any:
    """Stored numbers, nested as they are, at 50 digits."""
    return [exact(part) for part in numbers] if isinstance(numbers, list) else mp.mpf(numbers)


def dot(a: list[Any], b: list[Any]) -> Any:
    """a . b"""
    return mp.fdot(zip(a, b, strict=True))


def linear(rows: Matrix, weight: Tensor, bias: Tensor | None) -> Matrix:
    """x W^T + b, row by row."""
    matrix = exact(weight.tolist())
    shift = [mp.mpf(0)] * len(matrix) if bias is None else exact(bias.tolist())
    return [[dot(w, x) + b for w, b in zip(matrix, shift, strict=True)] for x in rows]


def entry(mask: Tensor, place: tuple[int, ...]) -> Any:
    """The entry of a mask at (b, h, i, j), its axes aligned with the last ones; an axis of size 1 serves all."""
    own = place[len(place) - mask.ndim :]
    numbers: Any = mask.tolist()
    for index, size in zip(own, mask.shape, strict=True):
        numbers = numbers[0 if size == 1 else index]
    return numbers


def added(problem: Problem, claims: Claims, place: tuple[int, ...]) -> Any:
    """What is added to the score at (b, h, i, j): -infinity where it may not attend, 0 for the extra keys."""
    if place[3] >= problem.key.shape[1]:
        return mp.mpf(0)
    number: Any = 0.0 if problem.mask is None else entry(problem.mask, place)
    if isinstance(number, bool):
        number = 0.0 if number else -math.inf
    last = place[2] + (problem.key.shape[1] - problem.query.shape[1] if claims.causal == "bottom_right" else 0)
    return mp.mpf(-math.inf if problem.is_causal and place[3] > last else number)


def softmax(scores: list[Any], empty_row: str) -> list[Any]:
    """Exponentials over their sum; the policy where no key may be attended to."""
    if all(score == -mp.inf for score in scores):
        return [{"zeros": mp.mpf(0), "nan": mp.nan, "uniform": 1 / mp.mpf(len(scores) or 1)}[empty_row]] * len(scores)
    raised = [mp.exp(score) for score in scores]
    total = sum(raised)
    return [part / total for part in raised]


def kv_heads(config: Config) -> list[int]:
    """The key/value head of each head: h // (n_heads / n_kv_heads)."""
    return [h // (config.n_heads // (config.n_kv_heads or config.n_heads)) for h in range(config.n_heads)]


def solve(problem: Problem, claims: Claims, scale: Any = None) -> dict[str, Any]:
    """Equations 1 and 3 of Vaswani et al. 2017; the names and shapes of `mha.spec.Answer`, in nested lists."""
    config, given = problem.config, problem.weights
    width = config.d_model // config.n_heads
    scale = 1 / mp.sqrt(width) if scale is None else mp.mpf(scale)
    solved: dict[str, Any] = {"output": [], "weights": [], "sums": [], "context": [], "key": [], "value": []}
    for b in range(problem.query.shape[0]):
        queries = linear(exact(problem.query[b].tolist()), given.w_q, given.b_q)
        keys = linear(exact(problem.key[b].tolist()), given.w_k, given.b_k)
        values = linear(exact(problem.value[b].tolist()), given.w_v, given.b_v)
        for rows, extra in ((keys, given.extra_k), (values, given.extra_v)):
            rows += [exact(extra.tolist())] if extra is not None else []
            rows += [[mp.mpf(0)] * len(given.w_k)] if config.zero_key else []
        weights: Matrix = [[] for _ in range(config.n_heads)]
        contexts: Matrix = [[] for _ in queries]
        for h, kv_head in enumerate(kv_heads(config)):
            own, kv = slice(h * width, (h + 1) * width), slice(kv_head * width, (kv_head + 1) * width)
            columns = [[value[place] for value in values] for place in range(kv.start, kv.stop)]
            for i, query in enumerate(queries):
                scores = [scale * dot(query[own], key[kv]) for key in keys]
                scores = [score + added(problem, claims, (b, h, i, j)) for j, score in enumerate(scores)]
                weights[h].append(softmax(scores, claims.empty_row))
                contexts[i] += [dot(weights[h][i], column) for column in columns]
        solved["weights"].append(weights)
        solved["context"].append(contexts)
        solved["output"].append(linear(contexts, given.w_o, given.b_o))
        solved["sums"].append([[sum(row) for row in head] for head in weights])
        for name, rows in {"key": keys, "value": values}.items():
            solved[name].append([[row[kv * width : (kv + 1) * width] for row in rows] for kv in kv_heads(config)])
    return solved


def assert_within(name: str, mid: Any, rad: Any, solved: Any) -> None:
    """Every number of nested lists is within its radius of the exact one, and NaN where that is NaN."""
    if isinstance(solved, list):
        for index, parts in enumerate(zip(mid, rad, solved, strict=True)):
            assert_within(f"{name}[{index}]", *parts)
    elif mp.isnan(solved):
        assert math.isnan(mid), f"{name} is {mid}, but should be NaN"
    else:
        assert abs(mp.mpf(mid) - solved) <= rad, f"{name} is {mid}, but should be {solved} within {rad}"


def assert_solved(problem: Problem, claims: Claims, scale: float | None = None) -> None:
    """The oracle gives what the loops give, within its own rounding in float64, whatever the dtype of the problem."""
    answer, solved = oracle(problem, claims, scale), solve(problem, claims, scale)
    float64 = {name: getattr(problem, name).double() for name in ("query", "key", "value")}
    radii = oracle(problem.change(weights=problem.weights.to(torch.float64), **float64), claims, scale)
    for name, numbers in solved.items():
        mid, rad = getattr(answer, name).mid, getattr(radii, name).rad
        assert_within(name, mid.tolist(), rad.tolist(), numbers)
        largest = mid.nan_to_num(nan=0.0).abs().max() if mid.numel() else 0.0
        assert (rad[~mid.isnan()] <= INFORMATIVE * largest + TINY).all(), f"{name}: a radius of {rad.max()}"
    if claims.empty_row != "uniform":
        rows = [row for item in solved["weights"] for head in item for row in head]
        assert answer.empty.flatten().tolist() == [not any(weight > 0 for weight in row) for row in rows]


def make(config: Config, sizes: Sizes, values: str = "normal", dtype: Any = torch.float64, **call: Any) -> Problem:
    """A problem of a regime, its numbers rounded to the dtype; `call` is its mask and its causal flag."""
    weights, *inputs = make_inputs(values, config, sizes, torch.Generator().manual_seed(0))
    return Problem(config, weights.to(dtype), *(x.to(dtype) for x in inputs), **call)


def boolean(shape: tuple[int, ...]) -> Tensor:
    """A mask without a period in any axis; its last row allows no key, if it has more than one row."""
    mask = torch.tensor([i * i % 11 < 5 for i in range(math.prod(shape))]).view(shape)
    rows = mask.view(-1, shape[-1])
    if len(rows) > 1:
        rows[-1] = False
    return mask


def additive(shape: tuple[int, ...]) -> Tensor:
    """Numbers from -2 to 2, and -infinity where `boolean` does not allow."""
    numbers = torch.tensor([(i * 5 % 13 - 6) / 3 for i in range(math.prod(shape))]).view(shape).double()
    return numbers.masked_fill(~boolean(shape), -math.inf)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_configurations(config: Config) -> None:
    assert_solved(make(config, (1, 2, 5)), Claims())


@pytest.mark.parametrize("mask", [None, boolean((5, 7)), additive((3, 1, 7))], ids=["none", "boolean", "additive"])
@pytest.mark.parametrize(
    "extras", [{"bias_kv": True}, {"zero_key": True}, {"bias_kv": True, "zero_key": True}], ids=str
)
@pytest.mark.parametrize("config", ["plain", "three-for-six"])
def test_extra_keys(config: str, extras: Any, mask: Tensor | None) -> None:
    mask = mask if config == "plain" else None
    assert_solved(make(replace(CONFIGS[config], **extras), (2, 5, 7), mask=mask, is_causal=mask is None), Claims())


@pytest.mark.parametrize("empty_row", ["zeros", "uniform"])
@pytest.mark.parametrize("config", [NARROW, replace(NARROW, bias=False), replace(NARROW, zero_key=True)], ids=str)
def test_no_keys(config: Config, empty_row: Any) -> None:
    assert_solved(make(config, (2, 3, 0)), Claims(empty_row=empty_row))


@pytest.mark.parametrize("values", VALUES)
def test_regimes(values: str) -> None:
    assert_solved(make(PLAIN, (1, 2, 7), values), Claims())


@pytest.mark.parametrize("sizes", LENGTHS, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("empty_row", EMPTY_ROWS)
def test_causal(sizes: Sizes, is_causal: bool, alignment: Any, empty_row: Any) -> None:
    assert_solved(make(NARROW, sizes, is_causal=is_causal), Claims(causal=alignment, empty_row=empty_row))


@pytest.mark.parametrize("empty_row", EMPTY_ROWS)
@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("form", [boolean, additive])
def test_masks(form: Any, shape: tuple[int, ...], empty_row: Any) -> None:
    assert_solved(make(NARROW, (2, 5, 7), mask=form(shape)), Claims(empty_row=empty_row))


@pytest.mark.parametrize("value", [False, -math.inf])
@pytest.mark.parametrize("empty_row", EMPTY_ROWS)
@pytest.mark.parametrize("config", ["no-bias", "two-for-four"])
def test_nothing_allowed(config: str, empty_row: Any, value: Any) -> None:
    assert_solved(make(CONFIGS[config], (1, 3, 5), mask=torch.full((1,), value)), Claims(empty_row=empty_row))


@pytest.mark.parametrize("form", [boolean, additive])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("config", ["plain", "two-for-six", "grouped-kdim-vdim"])
def test_mask_beside_causal(config: str, alignment: Any, form: Any) -> None:
    problem = make(CONFIGS[config], (2, 3, 5), mask=form((2, CONFIGS[config].n_heads, 3, 5)), is_causal=True)
    assert_solved(problem, Claims(causal=alignment))


@pytest.mark.parametrize("values", ["large", "offset", "tiny", "heavy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_not_the_oracle_s(dtype: torch.dtype, values: str) -> None:
    assert_solved(make(PLAIN, (1, 3, 5), values, dtype, mask=additive((3, 5)).to(dtype)), Claims())


@pytest.mark.parametrize("scale", [1.0, 0.3, 1 / 15])
def test_a_scale_that_is_given(scale: float) -> None:
    assert_solved(make(PLAIN, (1, 2, 3)), Claims(), scale)


@pytest.mark.parametrize(("n_kv_heads", "shared"), [(1, "000000"), (2, "000111"), (3, "001122"), (6, "012345")])
def test_neighbouring_heads_share(n_kv_heads: int, shared: str) -> None:
    assert kv_heads(Config(d_model=6, n_heads=6, n_kv_heads=n_kv_heads)) == [int(head) for head in shared]
