"""The numbers that users give, and the ranges in which they make sense; torch is not imported."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """What a number may be.

    zero: what 0 stands for, where that is outside of the range, or "".

    >>> Range(1, 64, zero="one a core").require("--jobs", 100000)
    Traceback (most recent call last):
    ValueError: --jobs must be a whole number from 1 to 64, or 0 for one a core, but is 100000
    """

    least: float
    most: float
    zero: str = ""
    whole: bool = True
    unit: str = ""

    def __str__(self) -> str:
        """Return what is expected, in words."""
        number = "a whole number" if self.whole else "a number"
        text = f"{number} from {_shown(self.least)} to {_shown(self.most)}"
        if self.unit:
            text += f" {self.unit}"
        if self.zero:
            text += f", or 0 for {self.zero}"
        return text

    def require(self, what: str, value: object) -> None:
        """Raise ValueError, in one line, unless a value is in the range; what: as users know it."""
        if not self.has(value):
            raise ValueError(f"{what} must be {self}, but is {_shown(value)}")

    def has(self, value: object) -> bool:
        """Return whether a value is in the range."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if isinstance(value, float) and (self.whole or not math.isfinite(value)):
            return False
        return self.least <= value <= self.most or (bool(self.zero) and value == 0)


def _shown(value: object) -> str:
    """Return a value as text, a long integer by its size: Python writes no thousands of digits."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        digits = int(math.log10(abs(value)))
        return f"about {'-' if value < 0 else ''}1e{digits}"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value!s:.40}"


# Those of torch's generators that every layer of the judge takes.
SEED = Range(0, 2**63 - 1)
# Each process of `mha check` takes some 200 MiB.
JOBS = Range(1, 256, zero="one a core")
YEAR = 365 * 24 * 3600
SECONDS = Range(0.001, YEAR, zero="no limit", whole=False, unit="seconds (a year)")
ROUNDS = Range(6, 100_000)
THREADS = Range(1, 4096, zero="as many as torch uses")
# Of a campaign.
TIMEOUT = Range(0.1, YEAR, zero="no limit", whole=False, unit="seconds (a year)")
MEMORY = Range(0.001, 2**20, zero="no limit", whole=False, unit="GiB")
WORKERS = Range(1, 4096, zero="one a core or, on a cluster, as many as it takes")
SHARDS = Range(1, 100_000)
MOST_SEEDS, MOST_WORDS, MOST_JOBS = 1_000_000, 10_000, 1_000_000
