"""Random cases: the strategies by which Hypothesis draws them, and by which it simplifies one that failed."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from mha.conformance.cases.boundary import SIZES
from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import VOLUMES, CaseSpace

DIGIT = 64
TILES = (16, 32, 64, 128, 256, 512)
# Sizes that a wrong axis can be mistaken for where they are equal: the second takes the first's value.
COINCIDENCES = (("n_heads", "B"), ("B", "S"), ("L", "S"), ("B", "L"), ("n_heads", "head_dim"), ("n_heads", "S"))


def drawn_cases(space: CaseSpace) -> SearchStrategy[Case]:
    """Return the strategy of the random phase; it shrinks each field towards its first level."""
    domain, longest = space.domain, space.longest
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
        return space.case(row)

    return st.fixed_dictionaries(drawn).map(case_of)


def simpler_cases(space: CaseSpace, case: Case) -> SearchStrategy[Case]:
    """Return cases between the simplest of a domain and one that failed, for Hypothesis to shrink.

    Each field keeps its value with a probability of about 7/8, so that the failure itself comes up soon.
    """

    @st.composite
    def cases(draw: Callable[[SearchStrategy[Any]], Any]) -> Case:
        row = {}
        for field, levels in (*space.domain.levels(space.longest).items(), ("seed", (0,))):
            value = getattr(case, field)
            simpler = levels[: levels.index(value)] if value in levels else levels
            keeps = not simpler or draw(st.integers(0, 7)) > 0
            row[field] = value if keeps else draw(st.sampled_from(simpler))
        return space.case(row)

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
