"""The two phases of a search: boundary cases that never depend on luck, then cases drawn by Hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from allpairspy import AllPairs
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import Domain
from mha.spec import Claims

TILES = (16, 32, 64, 128, 256, 512)


def boundary_cases(domain: Domain, claims: Claims, dtype: str, device: str, longest: int) -> list[Case]:
    """Return cases in which every two levels of any two fields meet at least once, smallest first."""
    levels = domain.levels(longest)
    rows = _pairwise(tuple(levels.items()))
    cases = [domain.case(claims, dtype, device, {**dict(row), "seed": seed}) for seed, row in enumerate(rows)]
    return sorted(cases, key=lambda case: (case.B * case.n_heads * case.head_dim * case.L * case.S, repr(case)))


@lru_cache(maxsize=256)
def _pairwise(levels: tuple[tuple[str, tuple[Any, ...]], ...]) -> list[tuple[tuple[str, Any], ...]]:
    names, columns = zip(*levels, strict=True)
    return [tuple(zip(names, row, strict=True)) for row in AllPairs([list(column) for column in columns])]


def drawn_cases(domain: Domain, claims: Claims, dtype: str, device: str, longest: int) -> SearchStrategy[Case]:
    """Return the strategy of the random phase; it shrinks each field towards its first level."""

    @st.composite
    def cases(draw: Callable[[SearchStrategy[Any]], Any]) -> Case:
        sizes = {
            "n_heads": draw(st.integers(domain.min_heads, domain.max_heads)),
            "head_dim": draw(st.integers(domain.min_head_dim, max(domain.min_head_dim, 8))),
            "B": draw(st.integers(domain.min_B, domain.max_B)),
        }
        limit = min(longest, domain.max_length)
        sizes["L"] = draw(lengths(domain.min_L, limit))
        sizes["S"] = draw(lengths(domain.min_S, limit))
        fields = ("bias", "mask", "causal", "inputs", "layout", "regime", "path", "need_weights")
        levels = domain.levels(longest)
        row = sizes | {field: draw(st.sampled_from(levels[field])) for field in fields}
        return domain.case(claims, dtype, device, row | {"seed": draw(st.integers(0, 2**16))})

    return cases()


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
            row[field] = draw(st.sampled_from((*simpler, *[value] * (7 * len(simpler) or 1))))
        return domain.case(claims, dtype, device, row)

    return cases()


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
