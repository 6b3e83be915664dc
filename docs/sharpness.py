"""How small an error is caught: prints the tables of docs/sharpness.md.

One number of a correct computation is changed by a relative amount, which grows until each of three
rules rejects the output. The rules see the same problems and the same outputs:

- the bound: every element is within the derived bound of the oracle (this is what the judge does);
- assert_close: `torch.testing.assert_close` at its defaults for the dtype, against the oracle;
- twice plain: the largest error is at most twice that of the plain formula in the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, product
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.harness.errors import Violation
from mha.conformance.harness.known_bad.catalogue import scores_times
from mha.conformance.harness.known_bad.defect import KnownBad
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import properties
from mha.conformance.properties.support.directions import directions
from mha.spec import Claims, Expected, Problem, Rounding, oracle
from mha.spec.directed import allowances
from mha.spec.directed_gradients import allowance_of_gradients
from mha.spec.gradient_graph import gradient_graph
from mha.spec.problem import INPUTS
from mha.spec.rounding_graph import rounding_graph

SEEDS = 200
# B, H, L, S and head_dim for the directed test.
DIRECTED = (
    (1, 2, 16, 16, 16),
    (2, 4, 33, 33, 16),
    (4, 4, 33, 33, 32),
    (4, 4, 65, 65, 32),
    (2, 4, 64, 64, 96),
    (32, 8, 33, 33, 16),
)
# Kinds of masks, and a part of what the result is as if.
OTHER_DEFECTS = (
    ("none", "the weights were"),
    ("bias", "the mask's numbers"),
    ("keys", "of a masked key were read"),
    ("none", "of the last allowed key were lost"),
    ("none", "added to each row sum"),
)
DTYPES = ("float64", "float32", "bfloat16", "float16")
# The relative changes that are tried, from 1e-15 to about 10.
CHANGES = [10 ** (-step / 4) for step in range(60, -5, -1)]
# How `attention` below rounds: it scales and stores the queries, stores scores and weights, and
# calls torch's softmax.
ROUNDING = Rounding(
    scores_stored=True,
    softmax_stored=False,
    scaling_roundings=1,
    exp_error=4,
    log_normaliser=False,
    rescales=0,
)
CLAIMS = Claims(masks={"bool", "float"}, rounding=ROUNDING)


class Sample(NamedTuple):
    """A problem, and what the oracle expects of it."""

    problem: Problem
    expected: Expected


Rule = Callable[[Tensor, Sample], bool]
Defect = Callable[[Problem, float], Tensor]


def within_bound(output: Tensor, sample: Sample) -> bool:
    """Return whether every element is within the bound."""
    expected = sample.expected.output
    return bool(((output.double() - expected.mid).abs() <= expected.rad).all())


def close_by_default(output: Tensor, sample: Sample) -> bool:
    """Return whether torch.testing.assert_close accepts the output."""
    try:
        torch.testing.assert_close(output, sample.expected.output.mid.to(output.dtype))
    except AssertionError:
        return False
    return True


def no_worse_than_twice_plain(output: Tensor, sample: Sample) -> bool:
    """Return whether the largest error is at most twice that of the plain formula."""
    exact = sample.expected.output.mid
    plain_error = (attention(sample.problem).double() - exact).abs().max()
    return bool((output.double() - exact).abs().max() <= 2 * plain_error)


RULES: dict[str, Rule] = {
    "the bound": within_bound,
    "assert_close": close_by_default,
    "twice plain": no_worse_than_twice_plain,
}


def attention(
    problem: Problem,
    *,
    scale: float = 1.0,
    weight: float = 1.0,
    entry: float = 0.0,
    scale_scores: bool = True,
) -> Tensor:
    """Return the output of attention, with one number changed.

    scale: a factor of the scale. weight, entry: a factor of one attention weight, and a relative
    change of one entry of the mask; both at the weight whose change matters most. scale_scores:
    scale the scores, not the queries.
    """
    given, heads = problem.weights, (problem.config.n_heads, problem.config.head_dim)
    q = F.linear(problem.query, given.w_q, given.b_q).unflatten(-1, heads).transpose(1, 2)
    k = F.linear(problem.key, given.w_k, given.b_k).unflatten(-1, heads).transpose(1, 2)
    v = F.linear(problem.value, given.w_v, given.b_v).unflatten(-1, heads).transpose(1, 2)
    factor = scale / heads[1] ** 0.5
    scores = q @ k.mT * factor if scale_scores else (q * factor) @ k.mT
    mask = (
        torch.zeros_like(scores)
        if problem.mask is None
        else problem.mask.expand(scores.shape).clone()
    )
    weights = (scores + mask).softmax(-1)
    place = torch.unravel_index((weights * (1 - weights)).argmax(), weights.shape)
    if entry:
        mask[place] *= 1 + entry
        weights = (scores + mask).softmax(-1)
    weights[place] *= weight
    return F.linear((weights @ v).transpose(1, 2).flatten(2), given.w_o, given.b_o)


DEFECTS: dict[str, Defect] = {
    "the scale": lambda problem, change: attention(problem, scale=1 + change, scale_scores=False),
    "one weight": lambda problem, change: attention(problem, weight=1 + change, scale_scores=False),
    "one mask entry": lambda problem, change: attention(problem, entry=change, scale_scores=False),
}


def sample_of(seed: int, dtype: str) -> Sample:
    """Return a problem with scores of moderate size and an additive mask."""
    sizes = {"n_heads": 1 + seed % 3, "head_dim": (2, 4, 8)[seed % 3], "B": 1 + seed % 2}
    case = Case(**sizes, L=1 + seed % 7, S=2 + seed % 16, dtype=dtype, mask="full_bias", seed=seed)
    problem = case.problem()
    assert problem.mask is not None
    problem = problem.change(mask=problem.mask.nan_to_num(neginf=1.0))
    return Sample(problem, oracle(problem, CLAIMS))


def smallest_scale_error(case: Case) -> float:
    """Return the smallest error of the scale, in steps of 0.1%, that NUM-7 rejects in a case."""
    check = properties()["NUM-7"][0].function
    for step in count(1):
        try:
            check(Session(KnownBad(scores_times(1 + step / 1000), Claims()), case), case)
        except Violation:
            return step / 1000
    raise AssertionError


def directed_rows() -> Iterator[str]:
    """Yield a row for each size: the median and the largest of the errors that NUM-7 rejects."""
    for sizes in DIRECTED:
        B, n_heads, L, S, head_dim = sizes
        case = Case(B=B, n_heads=n_heads, L=L, S=S, head_dim=head_dim)
        cells = []
        for dtype in ("bfloat16", "float16"):
            found = [
                smallest_scale_error(replace(case, dtype=dtype, seed=seed)) for seed in range(5)
            ]
            cells.append(f"{100 * median(found):.1f}%, {100 * max(found):.1f}%")
        yield f"{', '.join(map(str, sizes))} | {' | '.join(cells)}"


def gradient_rows() -> Iterator[str]:
    """Yield a row for each size: how much of the gradients of inputs rounding explains, GRD-8."""
    for sizes in DIRECTED:
        B, n_heads, L, S, head_dim = sizes
        cells = []
        for dtype in ("bfloat16", "float16"):
            shares: dict[str, list[float]] = {name: [] for name in INPUTS}
            for seed in range(5):
                case = Case(
                    B=B, n_heads=n_heads, L=L, S=S, head_dim=head_dim, dtype=dtype, seed=seed
                )
                problem = case.problem()
                upstream = torch.randn(problem.query.shape, generator=case.generator).to(
                    problem.query
                )
                graph = gradient_graph(problem, CLAIMS, upstream)
                for name in INPUTS:
                    part = allowance_of_gradients(graph, {name: graph.exact[name]})
                    shares[name].append(part.threshold / part.size)
            cells.append(", ".join(f"{100 * median(shares[name]):.1f}%" for name in INPUTS))
        yield f"{', '.join(map(str, sizes))} | {' | '.join(cells)}"


def defect_rows() -> Iterator[str]:
    """Yield a row for each size: how much of other defects rounding explains, by NUM-7."""
    for sizes in DIRECTED:
        B, n_heads, L, S, head_dim = sizes
        cells = []
        for dtype in ("bfloat16", "float16"):
            shares: dict[str, list[float]] = {text: [] for _, text in OTHER_DEFECTS}
            for seed, (mask, text) in product(range(5), OTHER_DEFECTS):
                case = Case(
                    B=B,
                    n_heads=n_heads,
                    L=L,
                    S=S,
                    head_dim=head_dim,
                    dtype=dtype,
                    seed=seed,
                    mask=mask,
                )
                graph = rounding_graph(case.problem(), CLAIMS)
                (along,) = (each for each in directions(graph, case) if text in each.more)
                (part,) = allowances(graph, [along.change["output"]])
                shares[text].append(part.threshold / part.size)
            cells.append(", ".join(f"{100 * median(found):.2g}%" for found in shares.values()))
        yield f"{', '.join(map(str, sizes))} | {' | '.join(cells)}"


def smallest_rejected(rule: Rule, defect: Defect, sample: Sample) -> float:
    """Return the smallest change from which on all are rejected; infinity if the largest is not."""
    smallest = float("inf")
    for change in sorted(CHANGES, reverse=True):
        if rule(defect(sample.problem, change), sample):
            break
        smallest = change
    return smallest


def rejected_changes(samples: list[Sample]) -> Iterator[str]:
    """Yield a row for each defect, from its name on: the smallest changes that rules reject."""
    for name, defect in DEFECTS.items():
        cells = []
        for rule in RULES.values():
            accepted = [sample for sample in samples if rule(defect(sample.problem, 0.0), sample)]
            changes = [smallest_rejected(rule, defect, sample) for sample in accepted]
            counted = "" if len(accepted) == len(samples) else f" ({len(accepted)})"
            cells.append(f"{rounded(median(changes))}, {rounded(max(changes))}{counted}")
        yield f"{name} | " + " | ".join(cells)


def errors_of_correct_outputs(samples: list[Sample]) -> str:
    """Return the cells of a row: median and largest error/bound, and how many each rule rejects."""
    ratios, rejected = [], dict.fromkeys(RULES, 0)
    for sample in samples:
        output = attention(sample.problem, scale_scores=False)
        for name, rule in RULES.items():
            rejected[name] += not rule(output, sample)
        ball = sample.expected.output
        ratios.append(float(((output.double() - ball.mid).abs() / ball.rad).max()))
    counts = ", ".join(f"{name} {number}" for name, number in rejected.items())
    return f"{median(ratios):.3f} | {max(ratios):.3f} | {counts}"


def rounded(change: float) -> str:
    """Return a change as it stands in the table."""
    return "never" if change == float("inf") else f"{change:.0e}"


@torch.no_grad()
def main() -> None:
    """Print the four tables."""
    torch.set_num_threads(1)
    print("| dtype | changed | " + " | ".join(f"{name}: median, always" for name in RULES) + " |")
    print("|---|---|" + "---|" * len(RULES))
    errors = []
    for dtype in DTYPES:
        samples = [sample_of(seed, dtype) for seed in range(SEEDS)]
        for row in rejected_changes(samples):
            print(f"| {dtype} | {row} |", flush=True)
        errors.append(f"| {dtype} | {errors_of_correct_outputs(samples)} |")
    print(f"\n| dtype | median of error/bound | largest | correct outputs rejected, of {SEEDS} |")
    print("|---|---|---|---|")
    print("\n".join(errors))
    print(
        "\n| B, H, L, S, head_dim | bfloat16: median, largest | float16: median, largest"
        " |\n|---|---|---|"
    )
    for row in directed_rows():
        print(f"| {row} |", flush=True)
    names = "weights, mask's numbers, masked key, last key, row sum"
    print(f"\n| B, H, L, S, head_dim | bfloat16: {names} | float16: the same |\n|---|---|---|")
    for row in defect_rows():
        print(f"| {row} |", flush=True)
    print(
        "\n| B, H, L, S, head_dim | bfloat16: query, key, value | float16: query, key, value"
        " |\n|---|---|---|"
    )
    for row in gradient_rows():
        print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()
