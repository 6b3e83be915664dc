"""Compare results with the oracle, block by block, and keep what there is to say."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mha.conformance.embedded.call import Block
from mha.conformance.embedded.verdict import Compared, Element
from mha.spec.bounds import Ball

# Wrong rows that are kept for the search for a cause.
MOST_ROWS = 64


@dataclass
class Tally:
    """Counts and places of one result so far.

    group: how many query heads share a key head.
    wrong_rows: places (item, head, row) of the first wrong rows.
    """

    name: str
    group: int
    elements: int = 0
    unknown: int = 0
    wrong: int = 0
    nans: int = 0
    margin: float = 0.0
    first: Element | None = None
    first_nan: Element | None = None
    worst: Element | None = None
    farthest: float = -1.0
    wrong_rows: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, block: Block, got: Tensor, expected: Ball, valid: Tensor | None = None) -> None:
        """Compare the numbers of a block, (b, h, g, l, ...), of which valid rows (b, l) count."""
        got = got.detach().double()
        if valid is not None:
            undefined = ~valid[:, None, None, :]
            while undefined.ndim < got.ndim:
                undefined = undefined.unsqueeze(-1)
            expected = Ball(expected.mid, expected.rad.masked_fill(undefined, math.inf))
        wrong, ratio = compared(got, expected)
        self.elements += got.numel()
        self.unknown += int(expected.rad.isinf().sum())
        inside = ratio.masked_fill(wrong, 0.0)
        if inside.numel():
            self.margin = max(self.margin, float(inside.amax()))
        if bool(wrong.any()):
            self._note(block, got, expected, wrong, ratio)

    def _note(
        self, block: Block, got: Tensor, expected: Ball, wrong: Tensor, ratio: Tensor
    ) -> None:
        """Note the wrong elements of a block."""
        self.wrong += int(wrong.sum())
        nan = wrong & got.isnan()
        self.nans += int(nan.sum())

        def element(place: int) -> Element:
            index = _unravelled(place, got.shape)
            numbers = [float(x[index]) for x in (got, expected.mid, expected.rad)]
            return Element(self._index(block, index), *numbers)

        if self.first is None:
            self.first = element(int(wrong.flatten().int().argmax()))
        if self.first_nan is None and bool(nan.any()):
            self.first_nan = element(int(nan.flatten().int().argmax()))
        outside = ratio.masked_fill(~wrong, -1.0)
        if float(outside.amax()) > self.farthest:
            self.farthest = float(outside.amax())
            self.worst = element(int(outside.argmax()))
        self._keep_rows(block, wrong)

    def _keep_rows(self, block: Block, wrong: Tensor) -> None:
        """Keep the places of wrong rows, as many as the search for a cause takes."""
        if wrong.ndim == 5:
            wrong = wrong.any(-1)
        for place in wrong.nonzero()[: MOST_ROWS - len(self.wrong_rows)].tolist():
            self.wrong_rows.append(self._index(block, tuple(place)))

    def _index(self, block: Block, place: tuple[int, ...]) -> tuple[int, ...]:
        """Return the index in the whole result of a place in a block."""
        item, of_keys, in_group, row, *rest = place
        head = (block.heads.start + of_keys) * self.group + block.group.start + in_group
        return (block.items.start + item, head, int(block.rows[row]), *rest)

    def done(self) -> Compared:
        """Return the comparison as data."""
        return Compared(
            name=self.name,
            elements=self.elements,
            unknown=self.unknown,
            wrong=self.wrong,
            nans=self.nans,
            margin=self.margin,
            first=self.first,
            worst=self.worst,
            first_nan=self.first_nan,
        )


def compared(got: Tensor, expected: Ball) -> tuple[Tensor, Tensor]:
    """Return which numbers are wrong, and error/bound of each, infinite where one is not finite.

    NaN and infinities must be in the same places; where the bound is infinite, nothing is known.
    """
    value, radius = expected.mid, expected.rad
    error = (got - value).abs()
    identical = (got == value) | (got.isnan() & value.isnan())
    finite = got.isfinite() & value.isfinite()
    right = torch.where(finite, error <= radius, identical) | (radius == math.inf)
    ratio = (error / radius).nan_to_num(nan=0.0, posinf=math.inf)
    ratio = torch.where(finite, ratio, math.inf).masked_fill(identical | (radius == math.inf), 0.0)
    return ~right, ratio


def _unravelled(flat: int, shape: torch.Size) -> tuple[int, ...]:
    """Return the index of a place in a flattened tensor."""
    place = list[int]()
    for size in reversed(shape):
        flat, index = divmod(flat, size)
        place.append(index)
    return tuple(reversed(place))
