"""What cases are worth: those that would say the same of known wrong answers prove nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from math import comb

from mha.conformance.cases.case import Case
from mha.conformance.harness.errors import CallRaised, Discard, Violation
from mha.conformance.harness.known_bad import KnownBad
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import Property
from mha.spec import Claims

# How many of the cases are also given to known wrong answers, fewer once so many rejected as would be unlikely of the
# least share; and how improbable it must be that so few reject. A wrong answer that none rejects is given all cases.
SAMPLED, UNLIKELY, IMPROBABLE = 24, 0.05, 2e-3


class Sensitivity:
    """How many cases of a property reject the known wrong answers that it exists to reject.

    rejected: how often each known wrong answer was rejected ("zeros") and tried ("zeros tried"). missed: how many cases
    a known wrong answer was given that none of them rejects.
    """

    def __init__(self, prop: Property, claims: Claims) -> None:
        self.prop, self.claims = prop, claims
        self.rejected, self.missed = Counter[str](), Counter[str]()

    def sample(self, cases: Sequence[Case]) -> None:
        """Give some of the cases, from the smallest to the largest, to the known wrong answers in turn."""
        defects, most = self.prop.must_reject, min(SAMPLED, len(cases))
        spread = [place for start in range(3) for place in range(start, most, 3)] if defects else []
        for number, place in enumerate(spread):
            defect = defects[number % len(defects)]
            if defect == defects[0] and self._biting:
                break
            rejected = rejects(self.prop, self.claims, cases[place * len(cases) // most], defect)
            if rejected is not None:
                self.rejected[defect] += rejected
                self.rejected[f"{defect} tried"] += 1
        for defect in defects:
            for case in cases if not self.rejected[defect] else ():
                rejected = rejects(self.prop, self.claims, case, defect)
                self.missed[defect] += rejected is False
                if rejected:
                    del self.missed[defect]
                    break

    @property
    def found(self) -> str:
        """Why the cases prove too little, if they do: known wrong answers are rejected in too small a share of them."""
        rejected, tried = self._counts
        floor = self.prop.min_rejection_rate
        if tried and _chance(range(rejected + 1), tried, floor) <= IMPROBABLE:
            wrong = ", ".join(self.prop.must_reject)
            return (
                f"{rejected} of {tried} cases reject the known wrong answers {wrong}: a share of {floor} is the least"
            )
        right = () if self.claims.masks or self.claims.causal else ("unmasked",)
        for defect, count in self.missed.items():
            if defect not in right and (1 - floor / 2) ** count <= IMPROBABLE:
                told = f"none of {count} cases rejects the known wrong answer {defect}"
                return f"{told}: a share of {floor / 2} is the least"
        return ""

    @property
    def _counts(self) -> tuple[int, int]:
        tried = sum(count for name, count in self.rejected.items() if name.endswith(" tried"))
        return self.rejected.total() - tried, tried

    @property
    def _biting(self) -> bool:
        """Whether so many would be unlikely if the share of cases that reject were the least."""
        rejected, tried = self._counts
        return _chance(range(rejected, tried + 1), tried, self.prop.min_rejection_rate) <= UNLIKELY


def _chance(counts: range, tried: int, share: float) -> float:
    """Return the probability that one of these counts of so many cases reject, if each does with this probability."""
    return sum(comb(tried, count) * share**count * (1 - share) ** (tried - count) for count in counts)


# Once for all implementations that claim alike.
@lru_cache(maxsize=1 << 16)
def rejects(prop: Property, claims: Claims, case: Case, defect: str) -> bool | None:
    """Whether a case rejects a known wrong answer; None where it says nothing of it."""
    try:
        prop.check(Session(KnownBad(defect, claims), case), case)
    except (Discard, CallRaised):
        return None
    except Violation:
        return True
    return False
