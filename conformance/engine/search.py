"""The search for a violation: boundary cases first, then cases that Hypothesis draws, and what they are worth."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import ceil

import hypothesis
from hypothesis import Phase, given, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from mha.conformance.cases.boundary import boundary_cases, varied
from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import Domain
from mha.conformance.cases.strategies import drawn_cases, simpler_cases
from mha.conformance.engine.preconditions import BASIC, plain_cases
from mha.conformance.engine.sensitivity import Sensitivity
from mha.conformance.harness.errors import CALL, CallRaised, Discard, Violation
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import Property
from mha.conformance.waivers import Waiver
from mha.spec import Implementation


@dataclass(frozen=True)
class Profile:
    """How far a run goes.

    boundary: the most boundary cases of a property: a few have every level of every field and most pairs of levels,
    all have every pair. examples: drawn for each property after them. longest: the longest L and S of most properties,
    and long: of those about long rows. again: in float64 one in so many of all these cases is tried, where float32 is
    claimed too: of the known faults, float32 finds whatever the others would (docs/bugfinding.md).
    """

    boundary: int
    examples: int
    longest: int
    long: int
    again: int = 1


ALL = 1 << 16
PROFILES = {
    "quick": Profile(24, 10, 33, 512),
    "default": Profile(ALL, 20, 260, 4096, again=2),
    "thorough": Profile(ALL, 1000, 520, 65536),
}
FLAKY = "; the same case did not fail every time, so a call depends on what came before it"
MAY_REFUSE = "the call with a causal flag and L != S is refused, which CAU-3 allows"
# Draws near a boundary case that failed: about one in six of them is that case, with nothing made simpler.
SHRINKING = 100


class Search:
    """The search for a violation of one property.

    failure: the trial that fails and its violation; the simplest that was found. remark: what else to say of it.
    waived: the first trial that each waiver covers, and its violation.
    examples: how many cases were tried; those that said nothing are not counted, and `left_out` says why. first: how
    many it took to the first failure.
    vacuity: what the cases are worth, once none failed.
    """

    def __init__(
        self,
        implementation: Implementation,
        prop: Property,
        domain: Domain,
        dtype: str,
        device: str,
        profile: Profile,
        seed: int,
        waivers: Collection[Waiver] = (),
    ) -> None:
        self.implementation, self.prop, self.waivers = implementation, prop, waivers
        self.waived: dict[Waiver, tuple[Session, Violation]] = {}
        self.among = profile.again if dtype == "float64" and "float32" in implementation.claims.dtypes else 1
        self.limit, self.drawn = (
            min(prop.max_cases, profile.boundary),
            min(profile.examples, prop.max_cases - 1) // self.among,
        )
        self.where = (
            domain,
            implementation.claims,
            dtype,
            device,
            profile.long if domain.scale == "long" else profile.longest,
        )
        self.seed = zlib.crc32(f"{seed}:{prop.clause}:{prop.number}:{dtype}:{device}".encode())
        self.failure: tuple[Session, Violation] | None = None
        self.tried: list[Case] = []
        self.sensitivity = Sensitivity(prop, implementation.claims)
        self.remark = self.left_out = ""
        self.margin, self.first = 0.0, 0

    @property
    def examples(self) -> int:
        """How many cases were tried."""
        return len(self.tried)

    @property
    def settled(self) -> bool:
        """Whether whatever else is found is waived too."""
        return any(not waiver.partial for waiver in self.waived)

    def run(self, shrink: Callable[[], bool]) -> None:
        """Try the boundary cases; shrink the first that fails, or else let Hypothesis draw, and shrink what fails.

        shrink: asked at the first failure, if there is one.
        """
        cases = boundary_cases(*self.where)
        cases = varied(cases, ceil(min(self.limit, len(cases)) / self.among))
        if self.prop.clause in BASIC:
            _, claims, dtype, device, _ = self.where
            cases = [*plain_cases(claims, dtype, device), *cases]  # so that what blocks others is a failure itself
        for case in cases:
            if self.settled:
                return
            try:
                self.attempt(case)
            except Violation as violation:
                # What another family of clauses names is no use here, however small.
                if shrink() and not violation.family:
                    self.draw(simpler_cases(*self.where, case), min(SHRINKING, 4 * self.prop.max_cases), shrink=True)
                return
        if self.drawn:
            self.draw(drawn_cases(*self.where), self.drawn, shrink=False)
        if self.settled:
            return
        if not self.failure:
            self.sensitivity.sample(self.tried)
        elif shrink() and not self.failure[1].family:
            first = self.failure
            self.draw(drawn_cases(*self.where), self.drawn, shrink=True)
            self.remark = FLAKY if self.failure is first else self.remark

    def attempt(self, case: Case) -> None:
        """Try one case; a violation is kept, with its trial, and raised, unless a waiver covers it."""
        trial = Session(self.implementation, case)
        try:
            self.prop.check(trial, case)
        except Discard as reason:
            self.left_out = str(reason)
            return
        except Violation as violation:
            if may_refuse(self.prop.clause, case, violation):
                self.left_out = MAY_REFUSE
                return
            self.tried.append(case)
            covering = [waiver for waiver in self.waivers if waiver.covers(case, violation.message)]
            for waiver in covering:
                self.waived.setdefault(waiver, (trial, violation))
            if covering:
                return
            self.failure, self.first = (trial, violation), self.first or self.examples
            raise
        self.tried.append(case)
        self.margin = max(self.margin, trial.margin)

    def draw(self, cases: SearchStrategy[Case], examples: int, *, shrink: bool) -> None:
        """Let Hypothesis draw cases up to the first failure, and shrink that one; the last failure is the simplest."""

        @hypothesis.seed(self.seed)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            print_blob=False,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        )
        @given(cases)
        def drawn(case: Case) -> None:
            self.attempt(case)

        try:
            drawn()
        except Violation:
            return
        except Flaky:
            self.remark = FLAKY


def may_refuse(clause: str, case: Case, violation: Violation) -> bool:
    """Whether a violation is a refusal that the contract allows: of a causal flag where L != S (CAU-3)."""
    refused = isinstance(violation, CallRaised) and violation.what == CALL
    return refused and case.causal and case.L != case.S and clause != "CAU-3"
