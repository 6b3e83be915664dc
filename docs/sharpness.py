"""How small an error is caught: writes the table of docs/sharpness.md to standard output.

One number of a correct computation is changed by a relative amount, which grows until each of three rules rejects the
output. The rules see the same problems and the same outputs:

- the bound: every element within the derived bound of the oracle (what the judge does);
- assert_close: `torch.testing.assert_close` at its defaults for the dtype, against the oracle's value;
- twice plain: the largest error is at most twice that of the plain formula in the same dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.spec import Claims, Expected, Problem, Rounding, oracle

SEEDS = 200
DTYPES = ("float64", "float32", "bfloat16", "float16")
STEPS = [10 ** (-place / 4) for place in range(60, -5, -1)]
# What the computation below does: the query is scaled and stored, so are scores and weights; torch's softmax is inside.
ROUNDING = Rounding(scores_stored=True, softmax_stored=False, scaling_roundings=1, exp_error=4, log_normaliser=False)
CLAIMS = Claims(masks={"bool", "float"}, rounding=ROUNDING)
Rule = Callable[[Tensor, Expected, Problem], bool]


def within_bound(output: Tensor, answer: Expected, problem: Problem) -> bool:
    """Whether every element is within the bound."""
    return bool(((output.double() - answer.output.mid).abs() <= answer.output.rad).all())


def close_by_default(output: Tensor, answer: Expected, problem: Problem) -> bool:
    """Whether torch.testing.assert_close accepts the output."""
    try:
        torch.testing.assert_close(output, answer.output.mid.to(output.dtype))
    except AssertionError:
        return False
    return True


def no_worse_than_twice_plain(output: Tensor, answer: Expected, problem: Problem) -> bool:
    """Whether the largest error is at most twice the plain formula's."""
    worst = (masked(problem).double() - answer.output.mid).abs().max()
    return bool((output.double() - answer.output.mid).abs().max() <= 2 * worst)


RULES: dict[str, Rule] = {
    "the bound": within_bound,
    "assert_close": close_by_default,
    "twice plain": no_worse_than_twice_plain,
}


def masked(problem: Problem, scale: float = 1.0, weight: float = 1.0, entry: float = 0.0, late: bool = True) -> Tensor:
    """Attend, with the scale and the central weight multiplied, and the central mask entry shifted.

    late: whether the scores are scaled, or the queries before.
    """
    given, heads = problem.weights, (problem.config.n_heads, problem.config.head_dim)
    q = F.linear(problem.query, given.w_q, given.b_q).unflatten(-1, heads).transpose(1, 2)
    k = F.linear(problem.key, given.w_k, given.b_k).unflatten(-1, heads).transpose(1, 2)
    v = F.linear(problem.value, given.w_v, given.b_v).unflatten(-1, heads).transpose(1, 2)
    factor = scale / heads[1] ** 0.5
    scores = q @ k.mT * factor if late else (q * factor) @ k.mT
    mask = torch.zeros_like(scores) if problem.mask is None else problem.mask.expand(scores.shape).clone()
    weights = (scores + mask).softmax(-1)
    place = torch.unravel_index((weights * (1 - weights)).argmax(), weights.shape)
    if entry:
        mask[place] *= 1 + entry
        weights = (scores + mask).softmax(-1)
    weights[place] *= weight
    return F.linear((weights @ v).transpose(1, 2).flatten(2), given.w_o, given.b_o)


DEFECTS: dict[str, Callable[[Problem, float], Tensor]] = {
    "the scale": lambda problem, size: masked(problem, scale=1 + size, late=False),
    "one weight": lambda problem, size: masked(problem, weight=1 + size, late=False),
    "one mask entry": lambda problem, size: masked(problem, entry=size, late=False),
}


def problem_of(seed: int, dtype: str) -> Problem:
    """A problem of moderate scores, with a mask of numbers."""
    sizes = {"n_heads": 1 + seed % 3, "head_dim": (2, 4, 8)[seed % 3], "B": 1 + seed % 2}
    case = Case(**sizes, L=1 + seed % 7, S=2 + seed % 16, dtype=dtype, mask="full_bias", seed=seed)
    problem = case.problem()
    assert problem.mask is not None
    return problem.change(mask=problem.mask.nan_to_num(neginf=1.0))


def smallest(rule: Rule, defect: Callable[[Problem, float], Tensor], problem: Problem, answer: Expected) -> float:
    """The smallest step from which on every larger one is rejected; infinity if none is."""
    found = float("inf")
    for size in sorted(STEPS, reverse=True):
        if rule(defect(problem, size), answer, problem):
            break
        found = size
    return found


def told(size: float) -> str:
    """A size for the table."""
    return "never" if size == float("inf") else f"{size:.0e}"


@torch.no_grad()
def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| dtype | changed | " + " | ".join(f"{name}: median, always" for name in RULES) + " |")
    print("|---|---|" + "---|" * len(RULES))
    notes = []
    for dtype in DTYPES:
        problems = [problem_of(seed, dtype) for seed in range(SEEDS)]
        answers = [oracle(problem, CLAIMS) for problem in problems]
        for name, defect in DEFECTS.items():
            cells = []
            for rule in RULES.values():
                pairs = [(p, a) for p, a in zip(problems, answers, strict=True) if rule(defect(p, 0.0), a, p)]
                sizes = [smallest(rule, defect, *pair) for pair in pairs]
                left = "" if len(pairs) == SEEDS else f" ({len(pairs)})"
                cells.append(f"{told(median(sizes))}, {told(max(sizes))}{left}")
            print(f"| {dtype} | {name} | " + " | ".join(cells) + " |")
            sys.stdout.flush()
        right = [masked(problem, late=False) for problem in problems]
        judged = list(zip(right, answers, problems, strict=True))
        wrongly = ", ".join(f"{name} {sum(not rule(*each) for each in judged)}" for name, rule in RULES.items())
        ratios = [float(((x.double() - a.output.mid).abs() / a.output.rad).max()) for x, a, _ in judged]
        notes.append(f"| {dtype} | {median(ratios):.3f} | {max(ratios):.3f} | {wrongly} |")
    print(f"\n| dtype | median of error/bound | largest | correct outputs rejected, of {SEEDS} |")
    print("|---|---|---|---|")
    print("\n".join(notes))


if __name__ == "__main__":
    main()
