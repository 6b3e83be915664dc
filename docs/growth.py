"""How the judge's cost grows, beside that of what it judges: prints the tables of docs/speed.md,
and draws growth.svg.

From a base case, one size at a time is doubled thrice. An entry is the power of the size that the
time grows with, from the largest two sizes: 1 is linear growth, 2 quadratic. A run is timed for
some of the clauses, and for some of the implementations.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import log2
from pathlib import Path
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
# In pixels, and for each doubling.
WIDTH, HEIGHT, LEFT, COLORS = 420, 280, 60, ("#2456b3", "#b3261e", "#1b6e3c", "#8a5a00", "#6a3fa0")


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


def to_svg(costs_at: Mapping[int, Mapping[str, float]]) -> str:
    """Draw the time of each part relative to the base case, both axes by powers of 2."""
    steps = max(log2(row[part] / costs_at[1][part]) for row in costs_at.values() for part in row)
    bottom = HEIGHT + 20
    picture = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {bottom + 150}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{LEFT}" y="13">time against L = S, relative to that at L = S = {BASE.L}</text>'
    ]
    for power in range(int(steps) + 1):
        y = bottom - HEIGHT * power / steps
        picture.append(f'<path d="M{LEFT} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
        picture.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{2**power}</text>')
    across = {
        factor: LEFT + WIDTH * place / (len(costs_at) - 1) for place, factor in enumerate(costs_at)
    }
    for factor, x in across.items():
        picture.append(
            f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{factor * BASE.L}</text>'
        )
    for number, part in enumerate(costs_at[1]):
        heights = {
            f: bottom - HEIGHT * log2(row[part] / costs_at[1][part]) / steps
            for f, row in costs_at.items()
        }
        line = "L".join(f"{across[factor]:.1f} {y:.1f}" for factor, y in heights.items())
        style = f'stroke="{COLORS[number]}" stroke-width="2" fill="none"'
        y = bottom + 46 + 18 * number
        picture.append(f'<path d="M{line}" {style}/><path d="M{LEFT} {y - 4}h30" {style}/>')
        picture.append(f'<text x="{LEFT + 40}" y="{y}">{part}</text>')
    return "".join(picture) + "</svg>\n"


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
            if (name, size) == (names[0], "L = S"):
                (Path(__file__).parent / "growth.svg").write_text(to_svg(found))
    judged(JUDGED[:1], 1.0)  # what only the first run does
    growth = [judged(JUDGED[:1], share) / judged(JUDGED[:1], 0.5) for share in (0.25, 0.5, 1.0)]
    print("clauses", *(f"{factor:.2f}" for factor in growth))
    growth = [judged(JUDGED[:number], 0.5) / judged(JUDGED[:1], 0.5) for number in (1, 2, 4)]
    print("implementations", *(f"{factor:.2f}" for factor in growth))


if __name__ == "__main__":
    main(sys.argv[1:] or ["sdpa", "loop"])
