"""How the judge's cost grows, beside that of what it judges: prints the tables of docs/speed.md.

From a base case, one size at a time is doubled thrice. An entry is the power of the size that the
time grows with, from the largest two sizes: 1 is linear growth, 2 quadratic. A run is timed for
some of the clauses, and for some of the implementations.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from math import log2
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch

from mha.conformance import check
from mha.conformance.cases.case import Case
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import properties
from mha.implementations import resolve
from mha.spec import gradients, oracle

BASE = Case(B=2, n_heads=4, L=128, S=128, head_dim=32, seed=1)
SIZES = {
    "B": ("B",),
    "H": ("n_heads",),
    "L": ("L",),
    "S": ("S",),
    "L = S": ("L", "S"),
    "head_dim": ("head_dim",),
}
FACTORS = (1, 2, 4, 8)
ROUNDS = 9
# Implementations with the same claims, more or less.
JUDGED = ("loop", "vectorized", "fused_qkv", "einops")


def seconds(function: Callable[[], Any]) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(ROUNDS):
        start = perf_counter()
        function()
        times.append(perf_counter() - start)
    return median(times[1:])


def costs(name: str, case: Case) -> dict[str, float]:
    """Return what one case costs, by part."""
    implementation = resolve(name)[0].implementation
    session, problem = Session(implementation, case), case.problem()
    upstream = session.upstream(problem)
    session(problem)
    return {
        f"{name}, forward": seconds(lambda: session(problem)),
        "oracle, forward": seconds(lambda: oracle(problem, implementation.claims)),
        f"{name}, forward and backward": seconds(lambda: session.gradients(problem, upstream)),
        "oracle, backward": seconds(lambda: gradients(problem, implementation.claims, upstream)),
        "making the case": seconds(case.problem),
    }


def judged(names: tuple[str, ...], share: float) -> float:
    """Return the seconds of a quick run over some implementations and a share of the clauses."""
    shuffled = random.Random(0).sample(sorted(properties()), len(properties()))
    clauses = shuffled[: round(share * len(shuffled))]
    start = process_time()
    for name in names:
        check(name, "quick", clauses=clauses, dtypes="float32")
    return process_time() - start


def main(names: list[str]) -> None:
    """Print a row for each size, with the powers, and the costs of the base case."""
    torch.set_num_threads(1)
    for name in names:
        base = costs(name, BASE)
        first = next(iter(base.values()))
        print(f"\n| | {' | '.join(base)} |\n|---|{'---|' * len(base)}")
        print(f"| base, relative | {' | '.join(f'{cost / first:.1f}' for cost in base.values())} |")
        for size, fields in SIZES.items():
            found = {}
            for factor in FACTORS:
                sizes = {field: factor * getattr(BASE, field) for field in fields}
                found[factor] = costs(name, replace(BASE, **sizes))
            powers = (f"{log2(found[8][part] / found[4][part]):.1f}" for part in base)
            print(f"| {size} | {' | '.join(powers)} |", flush=True)
    judged(JUDGED[:1], 1.0)  # what only the first run does
    growth = [judged(JUDGED[:1], share) / judged(JUDGED[:1], 0.5) for share in (0.25, 0.5, 1.0)]
    print("clauses", *(f"{factor:.2f}" for factor in growth))
    growth = [judged(JUDGED[:number], 0.5) / judged(JUDGED[:1], 0.5) for number in (1, 2, 4)]
    print("implementations", *(f"{factor:.2f}" for factor in growth))


if __name__ == "__main__":
    main(sys.argv[1:] or ["sdpa", "loop"])
