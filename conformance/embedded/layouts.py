"""Layouts of a kernel's tensors, named as einops patterns are, without einops."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

# The axes of heads and of a log-sum-exp in the order of the contract.
HEADS = ("b", "h", "l", "d")
ROWS = ("b", "h", "l")


@dataclass(frozen=True)
class Layout:
    """The axes of a tensor in order, each a group of axes that lie in it, the outer one first.

    An axis of the contract that a pattern does not name has the size 1; "1" is an axis of its own.

    >>> Layout.read("b l (h d)").groups
    (('b',), ('l',), ('h', 'd'))
    """

    groups: tuple[tuple[str, ...], ...]
    named: tuple[str, ...] = HEADS

    @classmethod
    def read(cls, pattern: str, named: tuple[str, ...] = HEADS) -> Layout:
        """Read a pattern such as "b l h d" or "(b h) l d".

        named: the axes that it may name, in the order of the contract.

        Raises ValueError for another pattern.
        """
        groups = re.findall(r"\([^()]*\)|[^()\s]+", pattern)
        axes = tuple(tuple(group.strip("()").split()) for group in groups)
        given = [axis for group in axes for axis in group if axis != "1"]
        if len(set(given)) != len(given) or not set(given) <= set(named) or named[-1] not in given:
            raise ValueError(
                f"a layout must name {', '.join(named)} once at most, and {named[-1]!r}, as in"
                f" {' '.join(named)!r}, but is {pattern!r}"
            )
        return cls(axes, named)

    def to_contract(self, x: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """Return a view of a tensor with all axes, in the order of the contract.

        sizes: those of all axes of a group but one.

        Raises ValueError for a tensor of other axes.
        """
        if x.ndim != len(self.groups):
            raise ValueError(f"has the shape {tuple(x.shape)}, not {self.pattern!r}")
        split = list[int]()
        names = list[str]()
        for size, group in zip(x.shape, self.groups, strict=True):
            split += self._split(size, group, sizes)
            names += group
        whole = x.reshape(split)
        order = [names.index(axis) for axis in self.named if axis in names]
        ones = [place for place, name in enumerate(names) if name == "1"]
        ordered = whole.permute(*ones, *order)
        for _ in ones:
            ordered = ordered.squeeze(0)
        for place, axis in enumerate(self.named):
            if axis not in names:
                ordered = ordered.unsqueeze(place)
        return ordered

    def from_contract(self, x: Tensor) -> Tensor:
        """Return a tensor with the axes of the contract in this layout."""
        in_order = [axis for group in self.groups for axis in group if axis != "1"]
        kept = [axis for axis in self.named if axis in in_order]
        for place, axis in reversed(list(enumerate(self.named))):
            if axis not in kept:
                x = x.squeeze(place)
        ordered = x.permute([kept.index(axis) for axis in in_order])
        shape = list[int]()
        place = 0
        for group in self.groups:
            own = [axis for axis in group if axis != "1"]
            shape.append(math.prod(ordered.shape[place : place + len(own)]))
            place += len(own)
        return ordered.reshape(shape)

    def _split(self, size: int, group: tuple[str, ...], sizes: Mapping[str, int]) -> list[int]:
        """Return the sizes of the axes in a group, of which one may not be known."""
        if group in ((), ("1",)):
            known = [1]
        elif len(group) == 1:
            known = [size]
        else:
            known = [sizes.get(axis, -1) for axis in group]
        if known.count(-1) > 1:
            raise ValueError(f"the layout {self.pattern!r} needs the number of heads: heads=...")
        rest = math.prod(number for number in known if number != -1)
        if -1 in known and rest and size % rest == 0:
            known[known.index(-1)] = size // rest
        if math.prod(known) != size:
            raise ValueError(f"has an axis of {size}, which is not {' '.join(group)} of {sizes}")
        return known

    @property
    def pattern(self) -> str:
        """The layout as it is written."""
        words = []
        for group in self.groups:
            text = " ".join(group)
            words.append(f"({text})" if len(group) > 1 else text)
        return " ".join(words)
