"""How far a run goes: the profiles."""

from __future__ import annotations

from dataclasses import dataclass

from mha.conformance.cases.boundary import NO_LIMIT


@dataclass(frozen=True)
class Profile:
    """How far a run goes.

    boundary: the most boundary cases of a property; a few cover every level of every field and most
        pairs of levels, all of them cover every pair.
    examples: the random cases of each property, after the boundary cases.
    longest: the longest L and S of most properties.
    long_rows: those of properties about long rows.
    timeout: in seconds, of one clause under pytest-timeout, where no other is set; 0 for none.
    float64_every: in float64, one in so many of these cases is tried where float32 is judged in the
        same run: of the known faults, float32 finds what the others would (docs/bugfinding.md).
    ranks: the most ranks of a sharded implementation.
    slow: whether properties whose single case takes many seconds are tried.
    sensitivity: whether the cases must be seen to reject known-bad answers.
    """

    boundary: int
    examples: int
    longest: int
    long_rows: int
    timeout: int
    float64_every: int = 1
    ranks: int = 2
    slow: bool = True
    sensitivity: bool = True

    @property
    def is_partial(self) -> bool:
        """Whether boundary cases are left out, so that a clause may fail where none was tried."""
        return self.boundary < NO_LIMIT


# From the least thorough to the most. "smoke" serves tests of this package: a case of each property
# proves too little of an implementation, so it is not among `PROFILE_NAMES`.
PROFILES = {
    "smoke": Profile(1, 0, 33, 512, 300, float64_every=2, slow=False, sensitivity=False),
    "quick": Profile(18, 6, 33, 512, 300, float64_every=2, slow=False),
    "default": Profile(NO_LIMIT, 20, 260, 4096, 900, float64_every=2),
    "thorough": Profile(NO_LIMIT, 1000, 520, 65536, 0, ranks=4),
}
