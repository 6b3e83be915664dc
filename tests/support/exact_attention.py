"""Attention at 50 digits, in plain loops over the stored numbers, or in complex numbers."""

from __future__ import annotations

import math
from typing import Any

from mpmath.ctx_mp import MPContext
from torch import Tensor

from mha.spec import Claims, Config, Problem

mp = MPContext()
mp.dps = 50

Matrix = list[list[Any]]


def exact(numbers: Any) -> Any:
    """Numbers of Python or mpmath, nested in lists, at 50 digits."""
    return [exact(part) for part in numbers] if isinstance(numbers, list) else mp.convert(numbers)


def dot(a: list[Any], b: list[Any]) -> Any:
    """a . b"""
    return mp.fdot(zip(a, b, strict=True))


def linear(rows: Matrix, weight: Any, bias: Any) -> Matrix:
    """x W^T + b, row by row."""
    matrix = exact(weight.tolist())
    shift = [mp.mpf(0)] * len(matrix) if bias is None else exact(bias.tolist())
    projected: Matrix = []
    for x in rows:
        projected.append([dot(w, x) + b for w, b in zip(matrix, shift, strict=True)])
    return projected


def mask_entry(mask: Tensor, place: tuple[int, ...]) -> Any:
    """The entry of a mask at (b, h, i, j), broadcast from its last axes."""
    aligned = place[len(place) - mask.ndim :]
    numbers: Any = mask.tolist()
    for index, size in zip(aligned, mask.shape, strict=True):
        numbers = numbers[0 if size == 1 else index]
    return numbers


def score_bias(problem: Problem, claims: Claims, place: tuple[int, ...]) -> Any:
    """The number added to the score at (b, h, i, j): -infinity where it may not attend."""
    queries, keys = problem.query.shape[1], problem.key.shape[1]
    if place[3] >= keys:
        return mp.mpf(0)
    number: Any = 0.0 if problem.mask is None else mask_entry(problem.mask, place)
    if isinstance(number, bool):
        number = 0.0 if number else -math.inf
    last = place[2] + (keys - queries if claims.causal == "bottom_right" else 0)
    return mp.mpf(-math.inf if problem.is_causal and place[3] > last else number)


def softmax(scores: list[Any], empty_row: str) -> list[Any]:
    """Exponentials over their sum, or the declared policy if no key is allowed."""
    if all(score == -mp.inf for score in scores):
        return [
            {"zeros": mp.mpf(0), "nan": mp.nan, "uniform": 1 / mp.mpf(len(scores) or 1)}[empty_row]
        ] * len(scores)
    raised = [mp.exp(score) for score in scores]
    total = sum(raised)
    return [part / total for part in raised]


def head_width(config: Config) -> int:
    """The width of one head."""
    return config.d_head or config.d_model // config.n_heads


def kv_heads(config: Config) -> list[int]:
    """The key/value head of each query head: h // (n_heads / n_kv_heads)."""
    return [
        h // (config.n_heads // (config.n_kv_heads or config.n_heads))
        for h in range(config.n_heads)
    ]


def head(rows: Matrix, index: int, width: int) -> Matrix:
    """The columns of one head."""
    return [row[index * width : (index + 1) * width] for row in rows]


def project(problem: Problem, b: int) -> tuple[Matrix, Matrix, Matrix]:
    """Queries, keys and values of item b, with the extra keys."""
    given = problem.weights
    queries = linear(exact(problem.query[b].tolist()), given.w_q, given.b_q)
    keys = linear(exact(problem.key[b].tolist()), given.w_k, given.b_k)
    values = linear(exact(problem.value[b].tolist()), given.w_v, given.b_v)
    for rows, extra in ((keys, given.extra_k), (values, given.extra_v)):
        rows += [exact(extra.tolist())] if extra is not None else []
        rows += [[mp.mpf(0)] * len(given.w_k)] if problem.config.zero_key else []
    return queries, keys, values


def attend(
    problem: Problem, claims: Claims, tau: Any, place: tuple[int, int], query: Matrix, keys: Matrix
) -> Matrix:
    """The rows of weights at (b, h), from the query and the keys of that head."""
    rows = []
    for i, q in enumerate(query):
        scores = [
            tau * dot(q, k) + score_bias(problem, claims, (*place, i, j))
            for j, k in enumerate(keys)
        ]
        rows.append(softmax(scores, claims.empty_row))
    return rows


def average(weights: list[Matrix], values: list[Matrix], width: int) -> Matrix:
    """The contexts of all heads, side by side."""
    context: Matrix = [[] for _ in weights[0]]
    for rows, value in zip(weights, values, strict=True):
        columns = list(zip(*value, strict=True)) if value else [()] * width
        for parts, row in zip(context, rows, strict=True):
            parts += [dot(row, column) for column in columns]
    return context


def solve_item(problem: Problem, claims: Claims, tau: Any, b: int) -> dict[str, Any]:
    """The results for item b."""
    config, given = problem.config, problem.weights
    width, shared = head_width(config), kv_heads(config)
    queries, keys, values = project(problem, b)
    query = [head(queries, h, width) for h in range(config.n_heads)]
    key = [head(keys, kv, width) for kv in shared]
    value = [head(values, kv, width) for kv in shared]
    weights = [
        attend(problem, claims, tau, (b, h), query[h], key[h]) for h in range(config.n_heads)
    ]
    context = average(weights, value, width)
    sums = [list(map(sum, rows)) for rows in weights]
    output = linear(context, given.w_o, given.b_o)
    inputs = {"query": query, "key": key, "value": value}
    return inputs | {"output": output, "weights": weights, "sums": sums, "context": context}


def solve(problem: Problem, claims: Claims) -> dict[str, list[Any]]:
    """Equations 1 and 3 of Vaswani et al. 2017, as nested lists named as in `Expected`."""
    tau = 1 / mp.sqrt(head_width(problem.config)) if claims.scale is None else mp.mpf(claims.scale)
    items = [solve_item(problem, claims, tau, b) for b in range(problem.query.shape[0])]
    solved: dict[str, list[Any]] = {}
    for name in items[0]:
        solved[name] = [item[name] for item in items]
    return solved


def assert_within(name: str, mid: Any, rad: Any, solved: Any) -> None:
    """Assert that each number is within its radius of the exact one, and NaN where that is."""
    if isinstance(solved, list):
        for index, parts in enumerate(zip(mid, rad, solved, strict=True)):
            assert_within(f"{name}[{index}]", *parts)
    elif mp.isnan(solved):
        assert math.isnan(mid), f"{name} is {mid}, but should be NaN"
    else:
        assert abs(mp.mpf(mid) - solved) <= rad, (
            f"{name} is {mid}, but should be {solved} within {rad}"
        )
