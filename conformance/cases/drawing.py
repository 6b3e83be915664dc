"""The two phases of a search: boundary cases that never depend on luck, then cases drawn by Hypothesis."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import astuple, fields
from functools import lru_cache
from itertools import combinations, count, product
from math import prod
from typing import Any

from allpairspy import AllPairs
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import EDGES, VOLUMES, Domain
from mha.spec import Claims

SIZES = ("n_heads", "head_dim", "B", "L", "S")
DIGIT = 64
TILES = (16, 32, 64, 128, 256, 512)
# Sizes that a wrong axis can be mistaken for where they are equal: the second takes the first's value.
COINCIDENCES = (("n_heads", "B"), ("B", "S"), ("L", "S"), ("B", "L"), ("n_heads", "head_dim"), ("n_heads", "S"))


def boundary_cases(domain: Domain, claims: Claims, dtype: str, device: str, longest: int) -> list[Case]:
    """Return cases in which every two levels of any two fields meet at least once, smallest first.

    The lengths at the edges of tiles take turns as the one level that stands for them.
    """
    levels = domain.levels(longest)
    rows = _pairwise(tuple(levels.items()), domain.volume)
    turns = {name: deque(domain.edges(longest)) for name in ("L", "S")}
    cases = [
        domain.case(claims, dtype, device, {**_with_edges(domain, dict(row), turns), "seed": seed})
        for seed, row in enumerate(rows)
    ]
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


def drawn_cases(domain: Domain, claims: Claims, dtype: str, device: str, longest: int) -> SearchStrategy[Case]:
    """Return the strategy of the random phase; it shrinks each field towards its first level."""
    limit = min(longest, domain.max_length)
    drawn: dict[str, SearchStrategy[Any]] = {
        "L": lengths(domain.min_L, limit),
        "S": lengths(domain.min_S, limit),
        "n_heads": st.integers(domain.min_heads, max(domain.min_heads, min(domain.max_heads, 4)))
        | st.integers(domain.min_heads, domain.max_heads),
        "head_dim": st.integers(domain.min_head_dim, max(domain.min_head_dim, 8)),
        "B": st.integers(domain.min_B, domain.max_B),
    }
    if domain.scale == "long":
        drawn |= {"L": st.integers(1, 40), "S": integers(longest // 8, longest)}
    elif domain.scale == "wide":
        drawn = {}
    levels = domain.levels(longest).items()
    drawn |= {name: st.sampled_from(values) for name, values in levels if name not in drawn}
    drawn["seed"] = integers(0, 2**16)
    drawn["equal"] = st.none() | st.sampled_from(COINCIDENCES) if domain.scale == "small" else st.none()

    def case_of(row: dict[str, Any]) -> Case:
        row = dict(row)
        if pair := row.pop("equal"):
            one, other = pair
            smallest, largest = domain.bounds_of(other, limit)
            row[other] = min(max(row[one], smallest), largest)
        # Long rows leave less room for heads, widths and items: a long case teaches as much with few of them.
        least = {"B": domain.min_B, "head_dim": domain.min_head_dim, "n_heads": domain.min_heads}
        if domain.scale == "wide":
            least = {"L": 1, "S": 1}
        for name, smallest in least.items():
            others = prod(row[size] for size in SIZES if size != name)
            row[name] = max(smallest, min(row[name], VOLUMES["wide" if domain.scale == "wide" else "small"] // others))
        return domain.case(claims, dtype, device, row)

    return st.fixed_dictionaries(drawn).map(case_of)


def simpler_cases(
    domain: Domain, claims: Claims, dtype: str, device: str, longest: int, case: Case
) -> SearchStrategy[Case]:
    """Return cases between the simplest of a domain and one that failed, for Hypothesis to shrink.

    Each field keeps its value with a probability of about 7/8, so that the failure itself comes up soon.
    """

    @st.composite
    def cases(draw: Callable[[SearchStrategy[Any]], Any]) -> Case:
        row = {}
        for field, levels in (*domain.levels(longest).items(), ("seed", (0,))):
            value = getattr(case, field)
            simpler = levels[: levels.index(value)] if value in levels else levels
            keeps = not simpler or draw(st.integers(0, 7)) > 0
            row[field] = value if keeps else draw(st.sampled_from(simpler))
        return domain.case(claims, dtype, device, row)

    return cases()


def integers(smallest: int, largest: int) -> SearchStrategy[int]:
    """Return a strategy of integers that are drawn in digits of less than 100.

    Into larger ones Hypothesis mixes constants of the source files that are loaded, so that the cases would depend on
    what else was imported.
    """
    most = largest - smallest
    if most < DIGIT:
        return st.integers(smallest, largest)
    return st.builds(
        lambda high, low: smallest + min(high * DIGIT + low, most),
        integers(0, most // DIGIT),
        st.integers(0, DIGIT - 1),
    )


def lengths(smallest: int, longest: int) -> SearchStrategy[int]:
    """Return a strategy of lengths: small ones mostly, and multiples of a tile with a residue of -1, 0 or 1."""
    small = st.integers(smallest, max(smallest, min(longest, 8)))
    tiles = [tile for tile in TILES if tile + 1 <= longest]
    if not tiles or smallest >= tiles[0]:
        return small
    tiled = st.builds(
        lambda tile, count, residue: min(tile * count + residue, longest),
        st.sampled_from(tiles),
        st.integers(1, 3),
        st.sampled_from((0, 1, -1)),
    )
    return st.one_of(small, small, small, tiled)
