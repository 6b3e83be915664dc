"""Sensitivity: whether the cases of a property can tell a correct answer from known-bad ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from itertools import cycle
from math import comb

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.modes import MODES
from mha.conformance.harness.errors import CallRaised, Discard, Violation
from mha.conformance.harness.known_bad.answers import REJECTED
from mha.conformance.harness.known_bad.defect import Defect, KnownBad
from mha.conformance.harness.recording import CallStep, RecordedOutput, RecordedTensor
from mha.conformance.harness.session import Instance, Session
from mha.conformance.properties.registry import Property
from mha.conformance.results import Rejections
from mha.implementations.process.pristine import as_our_own
from mha.spec import Claims, Problem
from mha.spec.bounds import Ball
from mha.spec.problem import INPUTS

# The most cases that known-bad answers are tried on, unless one is never rejected: then all. Fewer,
# once so many were tried, and the least share of them was rejected.
SAMPLED, ENOUGH = 24, 4
# A run of so few rejections is a fault of the judge, and one of none at all: their probabilities at
# the least rate.
IMPROBABLE, NONE = 0.01, 0.1
# So are known-bad answers that are right in all of so many cases.
ALL_RIGHT = 2


class Outcome(Enum):
    """What a property makes of a known-bad answer in a case."""

    REJECTED = "rejected"
    MISSED = "wrong, but not rejected"
    RIGHT = "right in this case"
    UNTRIED = "discarded, or refused"


class Sensitivity:
    """How many cases of a property reject its known-bad answers, of those in which they are wrong.

    rejections: of each known-bad answer; where a sample has none, of all cases.
    right: the cases in which one is right.
    """

    def __init__(self, prop: Property, claims: Claims) -> None:
        self.prop, self.claims = prop, claims
        # Without masks, to ignore them is right.
        right = () if claims.masks or claims.causal else ("unmasked",)
        self.defects = [defect for defect in prop.must_reject if defect not in right]
        self.rejections: dict[str, Rejections] = {}
        self.right = set[Case]()

    def sample(self, cases: Sequence[Case]) -> None:
        """Try the known-bad answers in turn on some of the cases, from the smallest to the largest.

        One that no case of the sample rejects is tried on all cases.
        """
        if not self.defects:
            return
        most = min(SAMPLED, len(cases))
        # Three rounds, each from the smallest cases to the largest, as the first may be enough.
        spread = [*range(0, most, 3), *range(1, most, 3), *range(2, most, 3)]
        for place, defect in zip(spread, cycle(self.defects), strict=False):
            if defect == self.defects[0] and self._is_enough:
                break
            self._try(defect, cases[place * len(cases) // most])
        for defect in self.defects:
            if not self.rejections.get(defect, Rejections(0, 0)).rejected:
                self._search(defect, cases)

    @property
    def problem(self) -> str:
        """Why the cases prove too little; empty if they prove enough."""
        total, rate = self._total, self.prop.min_rejection_rate
        least = IMPROBABLE if total.rejected else NONE
        defects = ", ".join(self.defects)
        if total.tried and _chance(total, rate) <= least:
            counts = f"only {total.rejected} of {total.tried} cases"
            return f"{counts} reject the known-bad answers {defects}; at least {rate:.0%} must"
        for defect, own in self.rejections.items():
            if _chance(own, rate) <= IMPROBABLE:
                counts = f"only {own.rejected} of {own.tried} cases"
                return f"{counts} reject the known-bad answer {defect}"
        if not total.tried and len(self.right) >= ALL_RIGHT:
            count = len(self.right)
            return f"the known-bad answers {defects} are right in all of {count} cases"
        return ""

    def _search(self, defect: str, cases: Sequence[Case]) -> None:
        """Try a known-bad answer on all cases, up to one that rejects it."""
        self.rejections.pop(defect, None)
        for case in cases:
            if self._try(defect, case) is Outcome.REJECTED:
                return

    def _try(self, defect: str, case: Case) -> Outcome:
        """Try a known-bad answer in a case, and count it."""
        found = outcome(self.prop, self.claims, case, REJECTED[defect])
        if found is Outcome.RIGHT:
            self.right.add(case)
        if found in (Outcome.REJECTED, Outcome.MISSED):
            one = Rejections(int(found is Outcome.REJECTED), 1)
            self.rejections[defect] = self.rejections.get(defect, Rejections(0, 0)) + one
        return found

    @property
    def _total(self) -> Rejections:
        """How often known-bad answers were tried and rejected, all together."""
        return sum(self.rejections.values(), Rejections(0, 0))

    @property
    def _is_enough(self) -> bool:
        """Whether enough was tried, and the least share of it rejected."""
        total, rate = self._total, self.prop.min_rejection_rate
        return total.tried >= ENOUGH and total.rejected >= rate * total.tried


def _chance(total: Rejections, rate: float) -> float:
    """Return the probability of so few rejections if each case rejects with this probability."""
    tried, chance = total.tried, 0.0
    for count in range(total.rejected + 1):
        chance += comb(tried, count) * rate**count * (1 - rate) ** (tried - count)
    return round(chance, 9)


# Once for all implementations with the same claims.
@lru_cache(maxsize=1 << 16)
def outcome(prop: Property, claims: Claims, case: Case, defect: Defect) -> Outcome:
    """Return what a property makes of a known-bad answer in a case.

    They are tried on the CPU, where they cost a fraction of what they do on a GPU.
    """
    case = replace(case, device="cpu")
    session = _Noting(KnownBad(defect, claims), case, prop)
    try:
        with as_our_own():
            prop.function(session, case)
            is_wrong = prop.within_bounds or session.has_been_wrong
    except (Discard, CallRaised):
        return Outcome.UNTRIED
    except Violation:
        return Outcome.REJECTED
    return Outcome.MISSED if is_wrong else Outcome.RIGHT


class _Noting(Session):
    """A session that notes what every call of a property returned."""

    def __init__(self, implementation: KnownBad, case: Case, prop: Property) -> None:
        super().__init__(implementation, case)
        self.looks_at_weights = "returns_weights" in prop.needs
        self.reads_empty_rows = prop.reads_empty_rows
        self._results: list[tuple[CallStep, RecordedOutput]] = []
        self._gradients: list[tuple[Problem, Tensor, dict[str, RecordedTensor]]] = []

    def _call(
        self, step: CallStep, instance: Instance, dtypes: tuple[torch.dtype, ...]
    ) -> RecordedOutput:
        result = super()._call(step, instance, dtypes)
        self._results.append((step, result))
        return result

    def gradients(
        self,
        problem: Problem,
        upstream: Tensor,
        wanted: Sequence[str] = (*INPUTS, "mask"),
        *,
        frozen: bool = False,
    ) -> dict[str, RecordedTensor]:
        """See `Session.gradients`."""
        found = super().gradients(problem, upstream, wanted, frozen=frozen)
        self._gradients.append((problem, upstream, found))
        return found

    @property
    def has_been_wrong(self) -> bool:
        """Whether a result is known to be wrong, by more than the bounds of two calls.

        What calls of another kind return, those with a cache among them, is not known here.
        """
        if not self._results or any(_may_drop(step) for step, _ in self._results):
            return True
        if any(self._is_wrong(step.problem, result) for step, result in self._results):
            return True
        for problem, upstream, found in self._gradients:
            expected = self.expected_gradients(problem, upstream)
            if any(_differs(gradient, expected[name]) for name, gradient in found.items()):
                return True
        return False

    def _is_wrong(self, problem: Problem, result: RecordedOutput) -> bool:
        try:
            expected = self.expected(problem)
        except (ValueError, RuntimeError):  # there should be no result
            return True
        output = expected.output
        if not self.reads_empty_rows:
            output = Ball(output.mid, output.rad.masked_fill(self._empty(problem), math.inf))
        if _differs(result.output, output):
            return True
        if not self.looks_at_weights or result.weights is None:
            return False
        return _differs(result.weights, expected.weights)

    def _empty(self, problem: Problem) -> Tensor:
        """Return the rows in which no head has an allowed key, boolean (B, L, 1)."""
        return problem.empty_rows(self.claims.alignment).all(1).unsqueeze(-1)


def _may_drop(step: CallStep) -> bool:
    return step.problem.config.drops and MODES[step.mode].training


def _differs(result: RecordedTensor, expected: Ball) -> bool:
    """Return whether a result is outside of twice the bound somewhere."""
    actual = result.tensor.detach().double()
    if actual.shape != expected.mid.shape:
        return True
    is_within = (actual - expected.mid).abs() <= 2 * expected.rad
    is_same = (actual == expected.mid) | (actual.isnan() & expected.mid.isnan())
    return not bool((is_within | is_same | expected.rad.isinf()).all())
