"""Which fault is planted into the class of which point."""

from __future__ import annotations

from functools import cache

from lattice.axes import HEAD_POINTS, PLAIN_POINTS, Point, points
from lattice.head_axes import has_head_axes
from lattice.head_plants import OF_HEAD_DECLARATION
from lattice.plants import PLANTS, Plant
from lattice.source import source_of

# Faults of what is declared: without a declaration, a convention of the class, or of an option that
# is not tried.
OF_DECLARATION = (
    "mask_upside_down",
    "empty_rows_are_nan",
    "other_alignment",
    "dropout_in_evaluation",
    *OF_HEAD_DECLARATION,
)
ABOUT_HEADS = {"ROT", "QKN", "WIN", "INC"}


def is_about_heads(plant: Plant) -> bool:
    """Return whether a fault is one of `head_plants`."""
    return plant.clauses[0].partition("-")[0] in ABOUT_HEADS


@cache
def assignment(plain: int = PLAIN_POINTS, with_heads: int = HEAD_POINTS) -> dict[Point, Plant]:
    """Return the fault of each point: of those that have a place there, the least common one.

    plain, with_heads: of each kind of points only so many, the first ones; a point with a rotation,
    a norm or a window gets a fault about these.
    """
    uses = dict.fromkeys((each.name for each in PLANTS), 0)
    chosen: dict[Point, Plant] = {}
    for point in points(plain, with_heads):
        source = source_of(point)
        fitting = [each for each in PLANTS if each.change(point, source) not in (None, source)]
        if has_head_axes(vars(point)):
            fitting = list(filter(is_about_heads, fitting)) or fitting
        chosen[point] = min(fitting, key=lambda each: uses[each.name])
        uses[chosen[point].name] += 1
    return chosen


def planted(point: Point, plant: Plant) -> str:
    """Return the source of a point with a fault."""
    source = plant.change(point, source_of(point))
    assert source is not None
    return source
