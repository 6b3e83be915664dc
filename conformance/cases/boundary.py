"""Boundary cases: any two levels of two fields occur together in some case."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import fields
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import Any

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import SIZES, TILE_EDGES, volume_of
from mha.conformance.cases.space import CaseSpace

Levels = tuple[tuple[str, tuple[Any, ...]], ...]
NO_LIMIT = 1 << 16
NAMES = [field.name for field in fields(Case) if field.name != "seed"]
# The fields whose values are of several types: biases, and what may be None.
MIXED = {"bias", *(field.name for field in fields(Case) if field.default is None)}
# So many rows are made in any case, which leaves every tile edge its turn.
LEAST = 48


def boundary_cases(space: CaseSpace, most: int = NO_LIMIT) -> list[Case]:
    """Return cases that cover every two levels of any two fields.

    They are sorted by size, then by the values of the fields.

    most: how many of them are tried. There may be more, but no more than hold nearly all that so
        many can cover.
    """
    levels = tuple(space.domain.levels(space.longest).items())
    # Of twice as many, `varied` then chooses; see there.
    made = pairwise_rows(levels, space.domain.volume, max(LEAST, 2 * most))
    rows: list[dict[str, Any]] = list(map(dict, made))
    for name in ("L", "S"):
        _spread_tile_edges(space, rows, name)
    cases = [space.case({**row, "seed": seed}) for seed, row in enumerate(rows)]
    return sorted(cases, key=_order)


def _order(case: Case) -> tuple[Any, ...]:
    """Return the volume of a case and its fields, as text where they may be of several types.

    None is first.
    """
    values = list[Any]()
    for name, value in vars(case).items():
        if name not in MIXED:
            values.append(value)
        else:
            values.append("" if value is None else str(value))
    return case.B * case.n_heads * case.head_dim * case.L * case.S, tuple(values)


def varied(cases: list[Case], most: int) -> list[Case]:
    """Return at most `most` of the cases, in their order.

    They are chosen one by one: the case with the most levels that no chosen case has, then with the
    most pairs of levels, then the first.
    """
    if len(cases) <= most:
        return cases
    differ = list[str]()
    for name in NAMES:
        values = {getattr(case, name) for case in cases}
        if len(values) > 1:
            differ.append(name)
    rows = list[list[tuple[str, Any]]]()
    for case in cases:
        rows.append([(name, getattr(case, name)) for name in differ])
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
        self.features = list(map(list, features))
        self.count = list(map(len, self.features))
        self.rows_with = defaultdict[Hashable, list[int]](list)
        for index, row in enumerate(self.features):
            for feature in row:
                self.rows_with[feature].append(index)

    def choose(self, index: int) -> None:
        """Choose a row: none of its features is new any more."""
        for feature in self.features[index]:
            for other in self.rows_with.pop(feature, ()):
                self.count[other] -= 1


def _spread_tile_edges(space: CaseSpace, rows: list[dict[str, Any]], name: str) -> None:
    """Let each tile edge have its turn as the length that stands for all of them in `levels`.

    The longest one goes where there is most room. Rows are added for edges that no row takes.

    name: of the length, "L" or "S".
    """
    turns = deque(sorted(space.domain.tile_edges(space.longest), reverse=True))
    by_room = sorted(rows, key=lambda row: volume_of(row, without=name))
    for row in by_room:
        if row[name] not in turns:
            continue
        row[name] = TILE_EDGES[0]
        for edge in turns:
            if _takes(space, row, name, edge):
                row[name] = edge
                break
        # It has had its turn: the others come first.
        turns.remove(row[name])
        turns.append(row[name])
    taken = {row[name] for row in rows}
    for edge in sorted(set(turns) - taken):
        for row in by_room:
            if _takes(space, row, name, edge):
                rows.append(row | {name: edge})
                break


def _takes(space: CaseSpace, row: dict[str, Any], name: str, edge: int) -> bool:
    """Return whether the case of a row can have a length, and all of it is seen."""
    row = row | {name: edge, "seed": 0}
    if volume_of(row) > space.domain.volume:
        return False
    case = space.case(row)
    if name == "S" and case.causal and case.alignment == "top_left" and edge > case.L:
        return False  # No query sees the last keys.
    return bool(getattr(case, name) >= edge)


@lru_cache(maxsize=1 << 12)
def pairwise_rows(
    levels: Levels, volume: float, most: int = NO_LIMIT
) -> list[tuple[tuple[str, Any], ...]]:
    """Return rows of (field, level) that cover every two levels of any two fields.

    Those that cover most are first.

    levels: of each field.
    volume: the largest product of the sizes of a row.
    most: rows at most.
    """
    pairs, rows = _Pairs(levels, volume), list[tuple[tuple[str, Any], ...]]()
    while len(rows) < most and (pair := pairs.next()):
        if pairs.fits(pair):
            rows.append(pairs.row_with(pair))
    return rows


class _Pairs:
    """The pairs of levels that no row has yet.

    nodes: (number of the field, level), for each level of each field.
    of_field: for each field, the numbers of its nodes.
    missing: for each node, the bits of the nodes that no row has it with.
    used: for each node, how many rows have it.
    least: the smallest level of each size, by the number of its field.
    """

    def __init__(self, levels: Levels, volume: float) -> None:
        self.levels, self.volume = levels, volume
        self.nodes = list[tuple[int, Any]]()
        self.of_field = list[list[int]]()
        self.least = dict[int, int]()
        for field, (name, column) in enumerate(levels):
            first = len(self.nodes)
            self.nodes += [(field, level) for level in column]
            self.of_field.append(list(range(first, len(self.nodes))))
            if name in SIZES:
                self.least[field] = min(column)
        every = (1 << len(self.nodes)) - 1
        # No node is missing with one of its own field.
        self.missing = [every - _bits(self.of_field[field]) for field, _ in self.nodes]
        self.used = [0] * len(self.nodes)

    def next(self) -> dict[int, int]:
        """Return a pair of nodes by their fields, and strike it out; empty if none is left."""
        one = max(range(len(self.nodes)), key=self._left)
        if not self.missing[one]:
            return {}
        others = [n for n in range(len(self.nodes)) if self.missing[one] >> n & 1]
        other = max(others, key=self._left)
        self._strike_out((one, other))
        (field, _), (other_field, _) = self.nodes[one], self.nodes[other]
        return {field: one, other_field: other}

    def fits(self, chosen: Mapping[int, int]) -> bool:
        """Return whether these nodes, and the smallest sizes beside them, are within the volume."""
        sizes = dict(self.least)
        for field, node in chosen.items():
            if field in sizes:
                _, sizes[field] = self.nodes[node]
        return prod(sizes.values()) <= self.volume

    def row_with(self, chosen: dict[int, int]) -> tuple[tuple[str, Any], ...]:
        """Return the row that adds to these nodes, for each field, the one with most missing pairs.

        Where there are several, it is the one that fewer rows have, so that few rows are all
        simplest levels.
        """
        bits = _bits(chosen.values())

        def rank(node: int) -> tuple[int, int]:
            return (self.missing[node] & bits).bit_count(), -self.used[node]

        for field, nodes in enumerate(self.of_field):
            if field in chosen:
                continue
            possible = nodes
            if field in self.least:
                possible = [node for node in nodes if self.fits(chosen | {field: node})]
            best = max(possible, key=rank)
            chosen, bits = chosen | {field: best}, bits | 1 << best
        self._strike_out(chosen.values())
        for node in chosen.values():
            self.used[node] += 1
        row = list[tuple[str, Any]]()
        for field, (name, _) in enumerate(self.levels):
            _, level = self.nodes[chosen[field]]
            row.append((name, level))
        return tuple(row)

    def _left(self, node: int) -> int:
        return self.missing[node].bit_count()

    def _strike_out(self, nodes: Collection[int]) -> None:
        others = ~_bits(nodes)
        for node in nodes:
            self.missing[node] &= others


def _bits(numbers: Iterable[int]) -> int:
    return sum(1 << number for number in numbers)
