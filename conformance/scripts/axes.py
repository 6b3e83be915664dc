"""Rearrangements of axes as methods of a tensor, since a script does not import einops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from mha.conformance.scripts.terms import InexpressibleError
from mha.implementations.adapters.loading import groups_of
from mha.implementations.adapters.mask_forms import axes_of


def rearranged(code: str, left: str, right: str, sizes: Mapping[str, int]) -> str:
    """Return the code that rearranges a tensor from one side of an einops pattern to the other one.

    code: of the tensor.
    sizes: of axes; in each group, all but one must be known.

    >>> rearranged("x", "b l (h d)", "b h l d", {"d": 4})
    'x.unflatten(2, (-1, 4)).transpose(1, 2)'
    >>> rearranged("x", "b h l d", "b l (h d)", {})
    'x.transpose(1, 2).flatten(2)'
    >>> rearranged("x", "(r h e) d", "(h r e) d", {"r": 3, "e": 4})
    'x.unflatten(0, (3, -1, 4)).transpose(0, 1).flatten(0, 2)'
    """
    if "1" in axes_of(left + " " + right) or sorted(axes_of(left)) != sorted(axes_of(right)):
        raise InexpressibleError(f"its parameters are laid out as {right!r}")
    return _joined(_ordered(_split(code, left, sizes), axes_of(left), axes_of(right)), right)


def _split(code: str, side: str, sizes: Mapping[str, int]) -> str:
    """Return the code that splits grouped axes; the last come first, so that others stay."""
    groups = list(map(axes_of, groups_of(side)))
    for place, axes in reversed([*enumerate(groups)]):
        if len(axes) == 1:
            continue
        lengths = [sizes.get(axis, -1) for axis in axes]
        if lengths.count(-1) > 1:
            raise InexpressibleError(f"its axes are laid out as {side!r}")
        code += f".unflatten({place}, ({', '.join(map(str, lengths))}))"
    return code


def _ordered(code: str, before: Sequence[str], after: Sequence[str]) -> str:
    order = [before.index(axis) for axis in after]
    moved = [place for place, old in enumerate(order) if place != old]
    if not moved:
        return code
    if len(moved) == 2:
        return f"{code}.transpose({moved[0]}, {moved[1]})"
    return f"{code}.permute({', '.join(map(str, order))})"


def _joined(code: str, side: str) -> str:
    """Return the code that joins axes into groups, the first ones first."""
    groups = [len(axes) for axes in map(axes_of, groups_of(side))]
    for place, count in enumerate(groups):
        if count == 1:
            continue
        last = place + count - 1
        if last == sum(groups[place:]) + place - 1:  # that of the tensor
            code += f".flatten({place})"
        else:
            code += f".flatten({place}, {last})"
    return code


def shape_as(code: str, shape: Sequence[int], wanted: Sequence[int]) -> str:
    """Return the code that brings a tensor of one shape to another one of as many numbers."""
    if tuple(shape) == tuple(wanted):
        return code
    assert prod(shape) == prod(wanted)
    return f"{code}.reshape({', '.join(map(str, wanted))})"
