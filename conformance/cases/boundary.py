"""Boundary cases, which never depend on luck: every two levels of any two fields meet at least once."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import astuple, fields
from functools import lru_cache
from itertools import combinations, count, product
from math import prod
from typing import Any

from allpairspy import AllPairs

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import EDGES, CaseSpace, Domain

SIZES = ("n_heads", "head_dim", "B", "L", "S")


def boundary_cases(space: CaseSpace) -> list[Case]:
    """Return cases in which every two levels of any two fields meet at least once, smallest first.

    The lengths at the edges of tiles take turns as the one level that stands for them.
    """
    domain, levels = space.domain, space.domain.levels(space.longest)
    rows = _pairwise(tuple(levels.items()), domain.volume)
    turns = {name: deque(domain.edges(space.longest)) for name in ("L", "S")}
    cases = [space.case({**_with_edges(domain, dict(row), turns), "seed": seed}) for seed, row in enumerate(rows)]
    return sorted(cases, key=lambda case: (case.B * case.n_heads * case.head_dim * case.L * case.S, astuple(case)))


def varied(cases: list[Case], most: int) -> list[Case]:
    """Return at most so many of the cases, in their order: those with most levels, then with most pairs of them."""
    if len(cases) <= most:
        return cases
    names = [field.name for field in fields(Case) if field.name != "seed"]
    rows = [[(name, getattr(case, name)) for name in names] for case in cases]
    bits = defaultdict[Any, int](count().__next__)  # sets as numbers: a bit for each level, and for each pair
    levels = [sum(1 << bits[level] for level in row) for row in rows]
    pairs = [sum(1 << bits[pair] for pair in combinations(row, 2)) for row in rows]
    found, left, seen, met = list[int](), list(range(len(cases))), 0, 0
    while len(found) < most:
        best = max(left, key=lambda place: ((levels[place] & ~seen).bit_count(), (pairs[place] & ~met).bit_count()))
        seen |= levels[best]
        met |= pairs[best]
        found.append(best)
        left.remove(best)
    return [cases[place] for place in sorted(found)]


def _with_edges(domain: Domain, row: dict[str, Any], turns: dict[str, deque[int]]) -> dict[str, Any]:
    """Put the next edge that leaves the case small enough where a row has the one that stands for all."""
    for name, edges in turns.items():
        if edges and row[name] == EDGES[0]:
            others = prod(row[size] for size in SIZES if size != name)
            fitting = next((edge for edge in edges if edge * others <= domain.volume), EDGES[0])
            row[name] = fitting
            edges.remove(fitting)
            edges.append(fitting)
    return row


@lru_cache(maxsize=1 << 12)
def _pairwise(levels: tuple[tuple[str, tuple[Any, ...]], ...], volume: float) -> list[tuple[tuple[str, Any], ...]]:
    names, columns = zip(*levels, strict=True)
    sizes = sum(name in SIZES for name in names)
    rows = AllPairs([list(column) for column in columns], filter_func=lambda row: prod(row[:sizes]) <= volume)
    found = [dict(zip(names, row, strict=True)) for row in rows]
    met = {pair for row in found for pair in combinations(row.items(), 2)}
    least = {name: min(column) if name in SIZES else column[0] for name, column in levels}
    # Where some rows are too large, AllPairs leaves out a few pairs that others would have.
    for (name, column), (other, others) in combinations(levels, 2):
        for value, second in product(column, others):
            row = least | {name: value, other: second}
            if ((name, value), (other, second)) not in met and prod(row[size] for size in SIZES) <= volume:
                found.append(row)
                met |= set(combinations(row.items(), 2))
    return [tuple(row.items()) for row in found]
