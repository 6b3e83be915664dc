"""How soon a fault is found, and by which cases.

Prints the table of docs/bugfinding.md. Every fault is tried by the
properties that must catch it, on the cases of the default profile and on others: at most 200 for a
property. A way finds a fault with the first case that fails.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from math import inf, isfinite
from statistics import mean
from time import process_time

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import FEW_LAYOUTS, Domain
from mha.conformance.cases.space import CaseSpace
from mha.conformance.engine.search import Budget, Search
from mha.conformance.faults.registry import FAULTS, Fault
from mha.conformance.properties.registry import Property, properties
from mha.conformance.settings import PROFILES, Profile
from mha.implementations.process.torch_state import threads

MOST = 200
DEFAULT = PROFILES["default"]
RANDOM = replace(DEFAULT, boundary=0, examples=MOST)
MARKS = (1, 10, 100, MOST)


@dataclass(frozen=True)
class Way:
    """Which cases are tried.

    limits: how many boundary cases and random ones. reduced: without the values and layouts that
    are there to find faults. grid: a grid of sizes, masks and causal flags instead. dtype: that of
    the fault if empty.
    """

    limits: Profile = DEFAULT
    reduced: bool = False
    grid: bool = False
    dtype: str = ""


SUITE = "default profile"
WAYS = {
    SUITE: Way(),
    "boundary cases only": Way(replace(DEFAULT, examples=0)),
    "random cases only": Way(RANDOM),
    "random, plain values and layouts only": Way(RANDOM, reduced=True),
    "a fixed grid": Way(reduced=True, grid=True),
    "default profile, in float64": Way(dtype="float64"),
    "in float64, as many cases as in float32": Way(
        replace(DEFAULT, float64_every=1), dtype="float64"
    ),
}


def grid(space: CaseSpace) -> Iterator[Case]:
    """Yield a grid as it is common in tests: a few sizes, each mask, causal or not."""
    domain = space.domain
    sizes = {
        "B": (1, 2),
        "L": (1, 8, 16, 33),
        "S": (1, 8, 16, 33),
        "n_heads": (1, 4),
        "head_dim": (8,),
    }
    levels = {
        **sizes,
        "mask": domain.masks,
        "causal": domain.causal,
        "inputs": domain.inputs[:1],
        "bias": domain.bias[:1],
        "layout": FEW_LAYOUTS[:1],
        "values": domain.values[:1],
        "mode": domain.modes[:1],
        "need_weights": domain.need_weights[:1],
    }
    bounds = {name: domain.size_range(name, DEFAULT.longest) for name in sizes}
    for values in product(*levels.values()):
        row = dict(zip(levels, values, strict=True))
        if all(low <= row[name] <= high for name, (low, high) in bounds.items()):
            yield space.case({**row, "seed": 0})


def search_of(way: Way, fault: Fault, prop: Property, seed: int) -> Search | None:
    """Return the search for a failure of a property, or None where the property does not apply."""
    claims, dtype = fault.implementation.claims, way.dtype or fault.dtype
    domain = prop.within(claims, dtype)
    if not isinstance(domain, Domain):
        return None
    if way.reduced:
        domain = replace(domain, values=domain.values[:1], layouts=FEW_LAYOUTS[:1])
    longest = way.limits.long_rows if domain.scale == "long" else way.limits.longest
    both = dtype == "float64" and "float32" in claims.dtypes
    return Search(
        fault.implementation,
        prop,
        CaseSpace(domain, claims, dtype, "cpu", longest),
        Budget.of(prop, way.limits, every=way.limits.float64_every if both else 1),
        seed=seed,
    )


def cases_to_failure(way: Way, fault: Fault, prop: Property, seed: int) -> tuple[float, int]:
    """Return the cases up to the first that fails, infinity if none does, and those tried."""
    search = search_of(way, fault, prop, seed)
    if search is None:
        return inf, 0
    with threads(1):
        if way.grid:
            return _first_of_grid(search)
        # Only the number of cases matters here, and the time up to the failure.
        search.sensitivity.sample = lambda cases: None  # type: ignore[method-assign]  # of this search alone
        search._worth_shrinking = lambda: False  # type: ignore[method-assign]  # of this search alone
        search.run()
    return (search.cases_to_failure if search.failure else inf), len(search.cases)


def _first_of_grid(search: Search) -> tuple[float, int]:
    """Try the cases of the grid; return as `cases_to_failure` does."""
    for case in islice(grid(search.space), MOST):
        try:
            search.attempt(case)
        except Exception:
            return search.cases_to_failure or len(search.cases), len(search.cases)
    return inf, len(search.cases)


def measure(
    name: str, seed: int, faults: Sequence[Fault] = FAULTS
) -> tuple[list[float], list[float]]:
    """Return for each fault the cases over all properties that must catch it, and the seconds."""
    counts, seconds = [], []
    for fault in faults:
        start, before, first = process_time(), 0, inf
        for prop in properties()[fault.clause]:
            if fault.caught_by not in ("", prop.name):
                continue
            needed, tried = cases_to_failure(WAYS[name], fault, prop, seed)
            if isfinite(needed):
                first = before + needed
                break
            before += tried
        counts.append(first)
        seconds.append(process_time() - start)
        print(f"{name:40} {fault.name:32} {first:>6g}", file=sys.stderr)
    return counts, seconds


def found_by(counts: Sequence[float], cases: int) -> float:
    """Return the share of the faults that so many cases find."""
    return sum(count <= cases for count in counts) / len(counts)


def to_markdown(
    counts: Mapping[str, Sequence[float]], seconds: Mapping[str, Sequence[float]]
) -> str:
    """Return the table; times are relative to the default profile, not to depend on a machine."""
    times = {}
    for name, values in counts.items():
        pairs = zip(seconds[name], values, strict=True)
        of_found = [time for time, count in pairs if isfinite(count)]
        if of_found:
            times[name] = mean(of_found)
    headings = ["cases", *(f"{most} or fewer" for most in MARKS), "in all", "time to find one"]
    rows = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for name, values in counts.items():
        shares = " | ".join(f"{found_by(values, most):.0%}" for most in MARKS)
        time = f"{times[name] / times[SUITE]:.1f}" if name in times and SUITE in times else " "
        rows.append(
            f"| {name} | {shares} | {sum(map(isfinite, values))} of {len(values)} | {time} |"
        )
    return "\n".join(rows) + "\n"


def main(seed: int = 0) -> None:
    """Measure all ways, and print the table."""
    results = {name: measure(name, seed) for name in WAYS}
    counts = {name: result[0] for name, result in results.items()}
    sys.stdout.write(to_markdown(counts, {name: result[1] for name, result in results.items()}))


if __name__ == "__main__":
    main()
