"""How soon a fault is found, and by which part of the design: writes docs/bugfinding.svg, and the table of
docs/bugfinding.md to standard output.

Every fault of the gallery is judged by the properties that must catch it, on the judge's own cases and on others. Each
way has 200 cases a property, or as many as it has; a way finds a fault at the first case that fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from time import perf_counter

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import FEW_LAYOUTS, Domain
from mha.conformance.engine.search import PROFILES, Profile, Search
from mha.conformance.faults.gallery import FAULTS, Fault, implementations
from mha.conformance.harness.isolation import threads
from mha.conformance.properties.registry import Property, properties
from mha.spec import Claims

MOST = 200
PROFILE = PROFILES["default"]
DRAWN = replace(PROFILE, boundary=0, examples=MOST)
MARKS = (1, 10, 100, MOST)
GRID = "a fixed grid"


def plain(domain: Domain) -> Domain:
    """Leave out what the domain is sharp with: regimes of numbers, and layouts."""
    return replace(domain, values=domain.values[:1], layouts=FEW_LAYOUTS[:1])


def grid(domain: Domain, claims: Claims, dtype: str) -> Iterator[Case]:
    """Yield a grid as tests have it: a few sizes, each mask, causal or not."""
    sizes = {"B": (1, 2), "L": (1, 8, 16, 33), "S": (1, 8, 16, 33), "n_heads": (1, 4), "head_dim": (8,)}
    flags = {"mask": domain.masks, "causal": domain.causal, "inputs": domain.inputs[:1], "bias": domain.bias[:1]}
    rest = {"layout": FEW_LAYOUTS[:1], "values": domain.values[:1], "mode": domain.modes[:1]}
    levels = {**sizes, **flags, **rest, "need_weights": domain.need_weights[:1]}
    bounds = {name: domain.size_range(name, PROFILE.longest) for name in sizes}
    for values in product(*levels.values()):
        row = dict(zip(levels, values, strict=True))
        if all(low <= row[name] <= high for name, (low, high) in bounds.items()):
            yield domain.case(claims, dtype, "cpu", {**row, "seed": 0})


def whole(domain: Domain) -> Domain:
    """Leave a domain as it is."""
    return domain


# Which cases, of which domain, in which dtype, if not in that of the fault.
WAYS: dict[str, tuple[Profile, Callable[[Domain], Domain], str]] = {
    "the judge": (PROFILE, whole, ""),
    "boundary cases alone": (replace(PROFILE, examples=0), whole, ""),
    "drawn cases alone": (DRAWN, whole, ""),
    "drawn, without regimes and layouts": (DRAWN, plain, ""),
    GRID: (PROFILE, plain, ""),
    "the judge, in float64": (PROFILE, whole, "float64"),
    "in float64, as many as in float32": (replace(PROFILE, again=1), whole, "float64"),
}
NEVER = 1 << 30


def found_by(way: str, fault: Fault, prop: Property, seed: int) -> tuple[int, int]:
    """Return how many cases a way takes to the first that fails, `NEVER` if none does, and how many it has."""
    implementation = implementations[fault.cls.__name__]
    profile, change, other = WAYS[way]
    dtype = other or fault.dtype
    domain = prop.within(implementation.claims, dtype)
    if not isinstance(domain, Domain):  # about other dtypes alone
        return NEVER, 0
    search = Search(implementation, prop, change(domain), dtype, "cpu", profile, seed)
    with threads(1):
        if way == GRID:
            for case in islice(grid(change(domain), implementation.claims, dtype), MOST):
                try:
                    search.attempt(case)
                except Exception:
                    return search.first or search.examples, search.examples
            return NEVER, search.examples
        search.sensitivity.sample = lambda cases: None  # type: ignore[method-assign]  # only the cases are of interest here
        search.run(lambda: False)
    return (search.first if search.failure else NEVER), search.examples


def measured(way: str, seed: int) -> tuple[list[int], list[float]]:
    """Return for each fault how many cases a way takes, over all properties that must catch it, and the seconds."""
    counts, seconds = [], []
    for fault in FAULTS:
        start, before, first = perf_counter(), 0, NEVER
        members = (prop for prop in properties()[fault.clause] if fault.by in ("", prop.name))
        for prop in members:
            took, tried = found_by(way, fault, prop, seed)
            if took < NEVER:
                first = before + took
                break
            before += tried
        counts.append(first)
        seconds.append(perf_counter() - start)
        print(f"{way:36} {fault.cls.__name__:32} {first if first < NEVER else '-':>6}", file=sys.stderr)
    return counts, seconds


def curve(found: dict[str, list[int]]) -> str:
    """Draw the share of the faults found against the number of cases, on a logarithmic scale."""
    from math import log10

    width, height, left, top = 640, 320, 50, 20
    colors = ("#1b6e3c", "#2456b3", "#b3261e", "#8a5a00", "#6a6f76", "#6d2c91", "#00707a")
    dashes = ("", "8 3", "2 3", "10 3 2 3", "5 5", "1 2", "12 6")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {top + height + 172}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="#fff"/>'
    ]

    def place(cases: int, share: float) -> str:
        return f"{left + width * log10(cases) / log10(MOST):.1f} {top + height * (1 - share):.1f}"

    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = place(1, share).split()[1]
        parts.append(f'<path d="M{left} {y}h{width}" stroke="#ddd"/><text x="{left - 8}" y="{y}" text-anchor="end">')
        parts.append(f"{share:.0%}</text>")
    for cases in (1, 2, 5, 10, 20, 50, 100, 200):
        x = place(cases, 0).split()[0]
        parts.append(f'<text x="{x}" y="{top + height + 18}" text-anchor="middle">{cases}</text>')
    parts.append(
        f'<text x="{left + width / 2}" y="{top + height + 38}" text-anchor="middle">cases until it is found</text>'
    )
    for number, (way, counts) in enumerate(found.items()):
        points = [(cases, sum(count <= cases for count in counts) / len(counts)) for cases in range(1, MOST + 1)]
        line = "L".join(place(*point) for point in points)
        style = f'stroke="{colors[number]}" stroke-dasharray="{dashes[number]}" stroke-width="2" fill="none"'
        y = top + height + 60 + 16 * number
        parts.append(f'<path d="M{line}" {style}/><path d="M{left} {y - 4}h40" {style}/>')
        parts.append(f'<text x="{left + 50}" y="{y}">{way}</text>')
    return "".join(parts) + "</svg>\n"


def main(seed: int = 0) -> None:
    """Measure all ways; draw the curve, and write the table."""
    found, seconds = {}, {}
    for way in WAYS:
        found[way], seconds[way] = measured(way, seed)
    rows = ["| cases | " + " | ".join(f"{most} or fewer" for most in MARKS) + " | in all | time to find one |"]
    rows.append("|---|" + "---|" * (len(MARKS) + 2))
    for way, counts in found.items():
        shares = [f"{sum(count <= most for count in counts) / len(counts):.0%}" for most in MARKS]
        caught = [time for time, count in zip(seconds[way], counts, strict=True) if count < NEVER]
        mean = sum(caught) / len(caught)
        rows.append(
            f"| {way} | {' | '.join(shares)} | {len(caught)} of {len(counts)} | {mean / base(seconds, found):.1f} |"
        )
    here = Path(__file__).parent
    (here / "bugfinding.svg").write_text(curve(found))
    sys.stdout.write("\n".join(rows) + "\n")


def base(seconds: dict[str, list[float]], found: dict[str, list[int]]) -> float:
    """Return the mean time of the judge's own way, to which times are compared: seconds tell of a machine."""
    own = [time for time, count in zip(seconds["the judge"], found["the judge"], strict=True) if count < NEVER]
    return sum(own) / len(own)


if __name__ == "__main__":
    main()
