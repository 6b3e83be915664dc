"""What stands between the projections and the scores: a norm of queries and keys, a rotation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import torch

Pairs = Literal["half", "interleaved"]
Tables = Literal["inside", "given"]
Direction = Literal["forward", "backward"]
NormKind = Literal["rms", "layer", "l2", "unit_rms"]
NormAxes = Literal["head", "width"]
NormWeight = Literal["scale", "offset"]
# Of a part of the columns of a head that is rotated: parts of models are a half, a quarter, 0.4.
LARGEST_DENOMINATOR = 64


@dataclass(frozen=True, slots=True)
class Rotary:
    """Queries and keys are rotated by their positions (clause ROT-1; Su et al. 2021).

    Of the first r columns of a head, each pair number m at position i is a point of a plane that is
    turned by the angle i * base^(-2m/r). Positions count from 0; with a cache they go on.

    base: of the geometric sequence of frequencies.
    pairs: a column is turned with the one r / 2 further on, or with the next one.
    part: r / d_k.
    tables: cosines and sines are made inside, or are given to each call.
    direction: "forward" turns from the first of a pair towards the second, as in the paper, and
        "backward" the other way.
    factor: what all angles are divided by, as for longer inputs (Chen et al. 2023).
    stretch: the base is base * stretch^(r / (r - 2)), so that the lowest frequency is divided by
        this, and the highest stays ("NTK-aware"). Heads then have more than one pair.

    Raises ValueError for a number out of range and for an unknown word.

    >>> Rotary(part=0.25).width(64), Rotary(part=0.25).multiple
    (16, 8)
    """

    base: float = 10000.0
    pairs: Pairs = "half"
    part: float = 1.0
    tables: Tables = "inside"
    direction: Direction = "forward"
    factor: float = 1.0
    stretch: float = 1.0

    def __post_init__(self) -> None:
        """Raise ValueError for a number out of range and for an unknown word."""
        if not (math.isfinite(self.base) and self.base > 1):
            raise ValueError(f"Rotary.base must be a number above 1, but is {self.base!r}")
        if not 0 < self.part <= 1:
            raise ValueError(f"Rotary.part must be above 0, and 1 at most, but is {self.part!r}")
        for name in ("factor", "stretch"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"Rotary.{name} must be a positive number, but is {value!r}")
        _require_words(self, {"pairs": Pairs, "tables": Tables, "direction": Direction})

    @property
    def _fraction(self) -> Fraction:
        return Fraction(self.part).limit_denominator(LARGEST_DENOMINATOR)

    @property
    def multiple(self) -> int:
        """What the width of a head is a multiple of, so that there are whole pairs to rotate."""
        part = self._fraction
        least = 2 * part.denominator // math.gcd(2 * part.denominator, part.numerator)
        return 2 * least if self.stretch != 1 and self.width(least) == 2 else least

    def width(self, head_dim: int) -> int:
        """Return r, how many columns of a head are rotated."""
        return int(head_dim * self._fraction) // 2 * 2

    def base_for(self, head_dim: int) -> float:
        """Return the base of the frequencies in heads of a width.

        >>> Rotary(stretch=4.0).base_for(4)
        160000.0
        """
        width = self.width(head_dim)
        return self.base * math.pow(self.stretch, width / max(width - 2, 1))


@dataclass(frozen=True, slots=True)
class QkNorm:
    """Queries and keys are divided by a norm after their projections (clause QKN-1).

    kind: "rms", x / sqrt(mean(x^2) + eps); "layer", the same with x less its mean; "l2",
        x / sqrt(max(sum(x^2), eps)), so that scores are cosines; "unit_rms", that times the root of
        the number of columns.
    over: the columns of each "head" on its own, or the whole "width" of all heads.
    before_rotary: whether it comes before a rotation, or after it.
    eps: what is added to the mean of squares; None for 2 u of the dtype, or of float32 in half
        precision, as in `torch.nn.functional.rms_norm` by default. Of "l2" and "unit_rms", the
        least sum of squares: 1e-24 for the 1e-12 of `torch.nn.functional.normalize`.
    weight: columns are then multiplied by a weight ("scale"), by 1 more than a weight ("offset"),
        as in Gemma, or not (None). It is one for all heads where the norm is over each head. A
        bias of a layer norm is zero.

    Raises ValueError for an eps that is not positive and for an unknown word.

    >>> QkNorm("rms").over
    'head'
    """

    kind: NormKind = "rms"
    over: NormAxes = "head"
    before_rotary: bool = True
    eps: float | None = 1e-6
    weight: NormWeight | None = "scale"

    def __post_init__(self) -> None:
        """Raise ValueError for an eps that is not positive and for an unknown word."""
        if self.eps is not None and not (math.isfinite(self.eps) and self.eps > 0):
            raise ValueError(f"QkNorm.eps must be positive, or None, but is {self.eps!r}")
        _require_words(self, {"kind": NormKind, "over": NormAxes})
        if self.weight not in (*get_args(NormWeight), None):
            words = ", ".join(map(repr, get_args(NormWeight)))
            raise ValueError(
                f"QkNorm.weight must be one of {words} or None, but is {self.weight!r}"
            )

    @property
    def places_count(self) -> bool:
        """Whether rotated scores depend on places, and not on their differences only.

        A norm after a rotation may multiply its columns, or take away their mean.
        """
        return not self.before_rotary and (self.weight is not None or self.kind == "layer")

    def eps_for(self, dtype: torch.dtype) -> float:
        """Return what is added to the mean of squares of numbers in a dtype; or their least sum."""
        import torch  # not above: claims are read without it

        wide = torch.promote_types(dtype, torch.float32)
        return torch.finfo(wide).eps if self.eps is None else self.eps


def _require_words(record: Rotary | QkNorm, words_of: dict[str, object]) -> None:
    """Raise ValueError for a field of a record that is none of its words."""
    for name, known in words_of.items():
        if getattr(record, name) not in get_args(known):
            words = ", ".join(map(repr, get_args(known)))
            raise ValueError(
                f"{type(record).__name__}.{name} must be one of {words}, but is"
                f" {getattr(record, name)!r}"
            )
