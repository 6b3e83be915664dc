"""Sensitivity: whether the cases of a property can tell a correct answer from known-bad ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import comb

from mha.conformance.cases.case import Case
from mha.conformance.harness.errors import CallRaised, Discard, Violation
from mha.conformance.harness.known_bad.answers import REJECTED
from mha.conformance.harness.known_bad.defect import Defect, KnownBad
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import Property
from mha.conformance.results import Rejections
from mha.implementations.pristine import as_our_own
from mha.spec import Claims

# The most cases that known-bad answers are tried on, unless one is never rejected: then all. Fewer, once as many were
# rejected as would be unlikely at the least rate.
SAMPLED, UNLIKELY = 24, 0.15
# A run of so few rejections is a fault of the judge: its probability at the least rate.
IMPROBABLE = 2e-3


class Sensitivity:
    """How many cases of a property reject the known-bad answers that it must reject.

    missed: for each known-bad answer that no case rejected, how many cases it was tried on.
    """

    def __init__(self, prop: Property, claims: Claims) -> None:
        self.prop, self.claims = prop, claims
        # Without masks, to ignore them is right.
        right = () if claims.masks or claims.causal else ("unmasked",)
        self.defects = [defect for defect in prop.must_reject if defect not in right]
        self.rejections: dict[str, Rejections] = {}
        self.missed: dict[str, int] = {}

    def sample(self, cases: Sequence[Case]) -> None:
        """Try the known-bad answers in turn on some of the cases, from the smallest to the largest."""
        defects, most = self.defects, min(SAMPLED, len(cases))
        spread = [place for start in range(3) for place in range(start, most, 3)] if defects else []
        for number, place in enumerate(spread):
            defect = defects[number % len(defects)]
            if defect == defects[0] and self._is_clear:
                break
            case = cases[place * len(cases) // most]
            self._count(defect, rejects(self.prop, self.claims, case, REJECTED[defect]))
        for defect in defects:
            if not (defect in self.rejections and self.rejections[defect].rejected):
                self._search(defect, cases)

    @property
    def problem(self) -> str:
        """Why the cases prove too little; empty if they prove enough."""
        total, rate = sum(self.rejections.values(), Rejections(0, 0)), self.prop.min_rejection_rate
        if total.tried and _chance(range(total.rejected + 1), total.tried, rate) <= IMPROBABLE:
            defects = ", ".join(self.defects)
            counts = f"only {total.rejected} of {total.tried} cases"
            return f"{counts} reject the known-bad answers {defects}; at least {rate:.0%} must"
        for defect, count in self.missed.items():
            if (1 - rate / 2) ** count <= IMPROBABLE:
                return f"none of {count} cases rejects the known-bad answer {defect}; at least {rate / 2:.0%} must"
        return ""

    def _search(self, defect: str, cases: Sequence[Case]) -> None:
        """Look for a case that rejects a known-bad answer, and count those that do not."""
        outcomes = []
        for case in cases:
            outcomes.append(rejects(self.prop, self.claims, case, REJECTED[defect]))
            if outcomes[-1]:
                return
        if False in outcomes:
            self.missed[defect] = outcomes.count(False)

    def _count(self, defect: str, rejected: bool | None) -> None:
        if rejected is not None:
            self.rejections[defect] = self.rejections.get(defect, Rejections(0, 0)) + Rejections(int(rejected), 1)

    @property
    def _is_clear(self) -> bool:
        """Whether so many rejections would be unlikely at the least rate."""
        total = sum(self.rejections.values(), Rejections(0, 0))
        return _chance(range(total.rejected, total.tried + 1), total.tried, self.prop.min_rejection_rate) <= UNLIKELY


def _chance(counts: range, tried: int, rate: float) -> float:
    """Return the probability that one of these counts of `tried` cases reject, if each does with this probability."""
    return sum(comb(tried, count) * rate**count * (1 - rate) ** (tried - count) for count in counts)


# Once for all implementations with the same claims.
@lru_cache(maxsize=1 << 16)
def rejects(prop: Property, claims: Claims, case: Case, defect: Defect) -> bool | None:
    """Return whether a property rejects a known-bad answer in a case; None where it does not apply to it.

    They are tried on the CPU, where they cost a fraction of what they do on a GPU.
    """
    case = replace(case, device="cpu")
    try:
        with as_our_own():
            prop.function(Session(KnownBad(defect, claims), case), case)
    except (Discard, CallRaised):
        return None
    except Violation:
        return True
    return False
