"""How the judge's cost grows with the sizes of a case, beside that of what it judges: prints a table of docs/speed.md.

From a base case, one size at a time is doubled thrice. An entry is the power of the size that the time grows with, from
the largest two sizes: 1 is linear growth, 2 quadratic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from math import log2
from statistics import median
from time import perf_counter
from typing import Any

import torch

from mha.conformance.cases.case import Case
from mha.conformance.harness.session import Session
from mha.implementations import resolve
from mha.spec import gradients, oracle

BASE = Case(B=2, n_heads=4, L=128, S=128, head_dim=32, seed=1)
SIZES = {"B": ("B",), "H": ("n_heads",), "L": ("L",), "S": ("S",), "L = S": ("L", "S"), "head_dim": ("head_dim",)}
ROUNDS = 9


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


def main(names: list[str]) -> None:
    """Print a row for each size, with the powers, and the costs of the base case relative to the first."""
    torch.set_num_threads(1)
    for name in names:
        base = costs(name, BASE)
        first = next(iter(base.values()))
        print(f"\n| | {' | '.join(base)} |\n|---|{'---|' * len(base)}")
        print(f"| base, relative | {' | '.join(f'{cost / first:.1f}' for cost in base.values())} |")
        for size, fields in SIZES.items():
            four, eight = (
                costs(name, replace(BASE, **{field: factor * getattr(BASE, field) for field in fields}))
                for factor in (4, 8)
            )
            powers = (f"{log2(eight[part] / four[part]):.1f}" for part in base)
            print(f"| {size} | {' | '.join(powers)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["sdpa", "loop"])
