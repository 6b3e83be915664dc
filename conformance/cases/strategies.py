"""Random cases: Hypothesis strategies that draw them, and that simplify one that failed."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import SIZES, VOLUMES, Domain
from mha.conformance.cases.space import CaseSpace

BASE = 64
# So many or fewer, for the reason that `integers` gives.
FEW_CHOICES = 99
# The most heads, and the widest one, of most random cases: small ones run fast, and shrink well.
FEW_HEADS, NARROW_HEAD = 4, 8
TILES = (16, 32, 64, 128, 256, 512)
# Sizes that code may confuse without failing where they are equal: in some cases, the second takes
# the first's value.
COINCIDENCES = (
    ("n_heads", "B"),
    ("B", "S"),
    ("L", "S"),
    ("B", "L"),
    ("n_heads", "head_dim"),
    ("n_heads", "S"),
)


def drawn_cases(space: CaseSpace) -> SearchStrategy[Case]:
    """Return the strategy of the random phase; each field shrinks towards its first level."""
    domain, longest = space.domain, space.longest
    limit = min(longest, domain.max_length)
    few_heads = max(domain.min_heads, min(domain.max_heads, FEW_HEADS))
    widest = max(domain.min_head_dim, NARROW_HEAD)
    # The order of the fields is that in which they are drawn: another one gives other cases.
    fields: dict[str, SearchStrategy[Any]] = {
        "L": lengths(domain.min_L, limit),
        "S": lengths(domain.min_S, limit),
        "n_heads": (
            st.integers(domain.min_heads, few_heads)
            | st.integers(domain.min_heads, domain.max_heads)
        ),
        "head_dim": st.integers(domain.min_head_dim, widest),
        "B": st.integers(domain.min_B, domain.max_B),
    }
    if domain.scale == "long":
        fields |= {"L": st.integers(1, 40), "S": integers(longest // 8, longest)}
    elif domain.scale == "wide":
        fields = {}
    for name, levels in domain.levels(longest).items():
        if name not in fields:
            fields[name] = st.sampled_from(levels)
    fields["seed"] = integers(0, 2**16)
    fields["equal"] = st.none()
    if domain.scale == "small":
        fields["equal"] = st.none() | st.sampled_from(COINCIDENCES)

    def case_of(drawn: tuple[Any, ...]) -> Case:
        row = dict(zip(fields, drawn, strict=True))
        if pair := row.pop("equal"):
            one, other = pair
            smallest, largest = domain.size_range(other, limit)
            row[other] = min(max(row[one], smallest), largest)
        return space.case(_within_volume(domain, row))

    return st.tuples(*fields.values()).map(case_of)


def _within_volume(domain: Domain, row: dict[str, Any]) -> dict[str, Any]:
    """Reduce other sizes where lengths make a case too large, or lengths in the scale "wide"."""
    if domain.scale == "wide":
        smallest, volume = {"L": 1, "S": 1}, VOLUMES["wide"]
    else:
        smallest = {"B": domain.min_B, "head_dim": domain.min_head_dim, "n_heads": domain.min_heads}
        volume = VOLUMES["small"]
    for name, least in smallest.items():
        others = prod(row[size] for size in SIZES if size != name)
        row[name] = max(least, min(row[name], volume // others))
    return row


def simpler_cases(space: CaseSpace, case: Case) -> SearchStrategy[Case]:
    """Return cases between the simplest of a domain and one that failed, for Hypothesis to shrink.

    Each field keeps its value with a probability of about 7/8, so the failing case itself is drawn
    soon.
    """

    @st.composite
    def cases(draw: Callable[[SearchStrategy[Any]], Any]) -> Case:
        row = {}
        levels_of = space.domain.levels(space.longest) | {"seed": (0,)}
        for field, simpler in levels_of.items():
            value = getattr(case, field)
            if value in simpler:
                simpler = simpler[: simpler.index(value)]
            kept = (value,) * max(1, min(7 * len(simpler), FEW_CHOICES - len(simpler)))
            row[field] = draw(st.sampled_from((*simpler, *kept)))
        return space.case(row)

    return cases()


def integers(smallest: int, largest: int) -> SearchStrategy[int]:
    """Return a strategy of integers, drawn digit by digit in base 64.

    Hypothesis mixes the integers that it finds in loaded source files, those of 100 or more, into
    what it draws. With a larger base, the cases of a seed would depend on what else has been
    imported.
    """
    most = largest - smallest
    if most < BASE:
        return st.integers(smallest, largest)
    return st.builds(
        lambda high, low: smallest + min(high * BASE + low, most),
        integers(0, most // BASE),
        st.integers(0, BASE - 1),
    )


def lengths(smallest: int, longest: int) -> SearchStrategy[int]:
    """Return a strategy of lengths: mostly small ones, or at most 1 off a multiple of a tile."""
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
