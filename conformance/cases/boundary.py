"""Boundary cases, which leave nothing to chance: any two levels of two fields occur together in some case."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import astuple, fields, replace
from functools import lru_cache
from itertools import combinations, islice, product
from math import prod
from typing import Any

from allpairspy import AllPairs

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import SIZES, TILE_EDGES, CaseSpace, Domain

Levels = tuple[tuple[str, tuple[Any, ...]], ...]
NO_LIMIT = 1 << 16
# So many rows are made in any case, which leaves every tile edge its turn.
LEAST = 48


def boundary_cases(space: CaseSpace, most: int = NO_LIMIT) -> list[Case]:
    """Return cases that cover every two levels of any two fields, sorted by size, then by the values of the fields.

    The lengths beside tile edges take turns as the one level that stands for them all.
    most: how many of them are tried. There may be more, but no more than hold nearly all that so many can cover.
    """
    domain, levels = space.domain, space.domain.levels(space.longest)
    rows = pairwise_rows(tuple(levels.items()), domain.volume, max(LEAST, 2 * most))
    turns = {name: deque(domain.tile_edges(space.longest)) for name in ("L", "S")}
    cases = [space.case({**_with_tile_edges(domain, dict(row), turns), "seed": seed}) for seed, row in enumerate(rows)]
    return sorted(cases, key=_order)


def _order(case: Case) -> tuple[Any, ...]:
    """Return the volume of a case and its fields; biases as text, since some are flags and some are names."""
    return case.B * case.n_heads * case.head_dim * case.L * case.S, astuple(replace(case, bias=str(case.bias)))


def varied(cases: list[Case], most: int) -> list[Case]:
    """Return at most `most` of the cases, in their order.

    They are chosen one by one: the case with the most levels that no chosen case has, then with the most pairs of
    levels, then the first.
    """
    if len(cases) <= most:
        return cases
    names = [field.name for field in fields(Case) if field.name != "seed"]
    rows = [[(name, getattr(case, name)) for name in names] for case in cases]
    levels = _Novelty(rows)
    pairs = _Novelty(combinations(row, 2) for row in rows)
    chosen, left = list[int](), list(range(len(cases)))
    while len(chosen) < most:
        best = max(left, key=lambda index: (levels.count[index], pairs.count[index]))
        levels.choose(best)
        pairs.choose(best)
        chosen.append(best)
        left.remove(best)
    return [cases[index] for index in sorted(chosen)]


class _Novelty:
    """How many features (levels, or pairs of levels) of each row no chosen row has.

    features: of each row, each once. count: by the index of the row.
    """

    def __init__(self, features: Iterable[Iterable[Hashable]]) -> None:
        self.features = [list(row) for row in features]
        self.count = [len(row) for row in self.features]
        self.rows_with = defaultdict[Hashable, list[int]](list)
        for index, row in enumerate(self.features):
            for feature in row:
                self.rows_with[feature].append(index)

    def choose(self, index: int) -> None:
        """Choose a row: none of its features is new any more."""
        for feature in self.features[index]:
            for other in self.rows_with.pop(feature, ()):
                self.count[other] -= 1


def _with_tile_edges(domain: Domain, row: dict[str, Any], turns: dict[str, deque[int]]) -> dict[str, Any]:
    """Replace a length that stands for all tile edges by the next one that keeps the case small enough."""
    for name, edges in turns.items():
        if edges and row[name] == TILE_EDGES[0]:
            others = prod(row[size] for size in SIZES if size != name)
            length = next((edge for edge in edges if edge * others <= domain.volume), TILE_EDGES[0])
            row[name] = length
            edges.remove(length)
            edges.append(length)
    return row


@lru_cache(maxsize=1 << 12)
def pairwise_rows(levels: Levels, volume: float, most: int = NO_LIMIT) -> list[tuple[tuple[str, Any], ...]]:
    """Return rows of (field, level) that cover every two levels of any two fields, those first that cover most.

    levels: of each field, the sizes first. volume: the largest product of the sizes of a row. most: rows at most.
    """
    names, columns = zip(*levels, strict=True)
    sizes = sum(name in SIZES for name in names)
    combined = AllPairs([list(column) for column in columns], filter_func=lambda row: prod(row[:sizes]) <= volume)
    rows = [dict(zip(names, row, strict=True)) for row in islice(combined, most)]
    if len(rows) < most:
        rows += _rows_of_missing_pairs(levels, volume, rows)
    return [tuple(row.items()) for row in rows[:most]]


def _rows_of_missing_pairs(levels: Levels, volume: float, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows for the few pairs that AllPairs misses where it may not combine all sizes."""
    covered = {pair for row in rows for pair in combinations(row.items(), 2)}
    simplest = {name: min(column) if name in SIZES else column[0] for name, column in levels}
    more = []
    for (one, column), (other, others) in combinations(levels, 2):
        for pair in product(((one, level) for level in column), ((other, level) for level in others)):
            row = simplest | dict(pair)
            if pair not in covered and prod(row[size] for size in SIZES) <= volume:
                more.append(row)
                covered |= set(combinations(row.items(), 2))
    return more
