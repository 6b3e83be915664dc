"""The search for a failure of one property: boundary cases, then random ones, and shrinking."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import ceil

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from mha.conformance.cases.boundary import boundary_cases, varied
from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import DENSE
from mha.conformance.cases.reasons import Reason
from mha.conformance.cases.space import CaseSpace
from mha.conformance.cases.strategies import drawn_cases, simpler_cases
from mha.conformance.engine.constants import only_readable_modules
from mha.conformance.engine.preconditions import (
    BASIC,
    FailedPrecondition,
    allowed_refusal,
    failed_layout,
    failed_precondition,
    plain_cases,
)
from mha.conformance.engine.sensitivity import Sensitivity
from mha.conformance.harness.errors import CallRaised, Discard, GpuLost, Violation
from mha.conformance.harness.integrity import require_never_touched
from mha.conformance.harness.isolation import of_property
from mha.conformance.harness.session import Session
from mha.conformance.profiles import Profile
from mha.conformance.properties.registry import Property
from mha.conformance.results import Rejections
from mha.conformance.sharding.group import RankError
from mha.conformance.waivers import Waiver
from mha.implementations.process.torch_state import preserved
from mha.spec import Implementation

TOO_COARSE = "with the rounding that is declared, wrong answers are within the bound"
FLAKY = "the same case did not fail every time, so a call depends on earlier calls"
# Cases between a failing boundary case and the simplest one: about one in six is the failing case
# itself.
SHRINKING = 100

Failure = tuple[Session, Violation]
Hears = Callable[[Property, Failure], object]
# What is given the first failure of a block of `told_at_once`.
_HEARS = ContextVar[Hears | None]("_HEARS", default=None)


@contextmanager
def told_at_once(hears: Hears) -> Iterator[None]:
    """Give `hears` the first failure that a search finds, before its case is made simpler."""
    token = _HEARS.set(hears)
    try:
        yield
    finally:
        _HEARS.reset(token)


@dataclass(frozen=True, kw_only=True)
class PropertyResult:
    """What the search for a failure of one property found.

    not_applicable: why no case applies; then nothing else is set.
    cases: those tried, without discarded ones.
    discard_reason: why a case was discarded.
    failure: the simplest failure found, which no waiver covers.
    cases_to_failure: how many cases it took.
    note: what to add to its message.
    blocked_by: what explains the failure.
    waived: the first failure that each waiver covers.
    fully_waived: whether a waiver covers whatever else would be found.
    margin: the largest error/bound.
    rejections: of known-bad answers.
    harness_error: why the property cannot be trusted.
    """

    prop: Property
    not_applicable: Reason | None = None
    cases: tuple[Case, ...] = ()
    discard_reason: str = ""
    failure: Failure | None = None
    cases_to_failure: int = 0
    note: str = ""
    blocked_by: FailedPrecondition | None = None
    waived: dict[Waiver, Failure] = field(default_factory=dict)
    fully_waived: bool = False
    margin: float = 0.0
    rejections: dict[str, Rejections] = field(default_factory=dict)
    harness_error: str = ""

    @property
    def ends(self) -> bool:
        """Whether it decides the clause, so that its other properties need not be tried."""
        return bool(self.failure or self.harness_error or self.fully_waived)


@dataclass(frozen=True)
class Budget:
    """How many cases a search may try: boundary cases, random ones, and of both one in `every`.

    sensitivity: whether known-bad answers are tried too.
    """

    boundary: int
    examples: int
    every: int = 1
    sensitivity: bool = True

    @staticmethod
    def of(prop: Property, limits: Profile, every: int = 1) -> Budget:
        """Return the budget of a property in a profile."""
        return Budget(
            boundary=min(prop.max_cases, limits.boundary),
            examples=min(limits.examples, prop.max_cases - 1) // every,
            every=every,
            sensitivity=limits.sensitivity,
        )


class Search:
    """Tries cases of a property in turn, up to the first failure, and makes that case simpler.

    Everything starts in `run`, every case is tried by `attempt`, and what is found is collected in
    the fields of `PropertyResult`. Where no case fails, known-bad answers are tried on the same
    cases: a property that lets them pass proves nothing.
    """

    def __init__(
        self,
        implementation: Implementation,
        prop: Property,
        space: CaseSpace,
        budget: Budget,
        *,
        seed: int,
        waivers: Collection[Waiver] = (),
    ) -> None:
        self.implementation = implementation
        self.prop, self.space, self.budget, self.waivers = prop, space, budget, waivers
        key = f"{seed}:{prop.clause}:{prop.number}:{space.dtype}:{space.device}"
        self.seed = zlib.crc32(key.encode())
        self.sensitivity = Sensitivity(prop, implementation.claims)
        self.cases: list[Case] = []
        self.failure: Failure | None = None
        self.waived: dict[Waiver, Failure] = {}
        self.blocked_by: FailedPrecondition | None = None
        self.discard_reason = self.note = ""
        self.margin, self.cases_to_failure = 0.0, 0

    def run(self) -> None:
        """Try the boundary cases, then random ones, up to the first failure, which is shrunk."""
        failing = self._first_failing(self._boundary_cases())
        if failing is not None:
            self._simplify_boundary_case(failing)
            return
        if self.budget.examples and not self.fully_waived:
            self._draw(drawn_cases(self.space), self.budget.examples, shrink=False)
        if self.fully_waived:
            return
        if self.failure is not None:
            self._shrink_drawn_case()
        elif self.budget.sensitivity:
            self.sensitivity.sample(self.cases)

    @property
    def fully_waived(self) -> bool:
        """Whether a waiver covers whatever else would be found."""
        return any(not waiver.partial for waiver in self.waived)

    def _boundary_cases(self) -> list[Case]:
        """Return the boundary cases of the budget, after the plain ones for a basic clause."""
        cases = boundary_cases(self.space, self.budget.boundary)
        count = min(self.budget.boundary, len(cases))
        cases = varied(cases, ceil(count / self.budget.every))
        if self.prop.clause in BASIC:  # so that what blocks other clauses is a failure of its own
            return [*self._plain_cases(), *cases]
        return cases

    def _plain_cases(self) -> list[Case]:
        return plain_cases(self.space.claims, self.space.dtype, self.space.device)

    def _first_failing(self, cases: Sequence[Case]) -> Case | None:
        """Try cases in turn; return the first that fails."""
        for case in cases:
            if self.fully_waived:
                return None
            try:
                self.attempt(case)
            except Violation:
                return case
        return None

    def _draw(self, cases: SearchStrategy[Case], examples: int, *, shrink: bool) -> None:
        """Let Hypothesis draw cases up to the first failure, and shrink it.

        It repeats smaller and smaller failing cases, so that the last failure is the simplest.
        """

        @hypothesis.seed(self.seed)
        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            print_blob=False,
            report_multiple_bugs=False,
            # A busy machine is no fault of the strategy.
            suppress_health_check=[HealthCheck.too_slow],
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        )
        @hypothesis.given(cases)
        def drawn(case: Case) -> None:
            self.attempt(case)

        try:
            with only_readable_modules():
                drawn()
        except Violation:
            return
        except Flaky:
            self.note = FLAKY

    def _simplify_boundary_case(self, failing: Case) -> None:
        """Draw cases between a failing boundary case and the simplest one, up to one that fails."""
        if self._worth_shrinking():
            simpler = simpler_cases(self.space, failing)
            self._draw(simpler, min(SHRINKING, 4 * self.prop.max_cases), shrink=True)
            self._find_block()

    def _shrink_drawn_case(self) -> None:
        """Draw the same cases once more, and shrink the one that fails."""
        if not self._worth_shrinking():
            return
        first = self.failure
        self._draw(drawn_cases(self.space), self.budget.examples, shrink=True)
        if self.failure is first:  # the second time, nothing failed
            self.note = FLAKY
        self._find_block()

    def _worth_shrinking(self) -> bool:
        """Return whether nothing else explains a failure, and not every call shows it."""
        self._find_block()
        assert self.failure is not None
        violation = self.failure[1]
        every_call = violation.family and len(self.cases) == 1
        # Each such failure ends the ranks, which others must be started for.
        ended_ranks = isinstance(violation, CallRaised) and isinstance(violation.error, RankError)
        return self.blocked_by is None and not every_call and not ended_ranks

    def _find_block(self) -> None:
        """Look for what explains the failure."""
        assert self.failure is not None
        implementation, prop, case = self.implementation, self.prop, self.failure[0].case
        plain = failed_precondition(implementation, prop, case.dtype, case.device)
        self.blocked_by = plain or failed_layout(implementation, prop, case)

    def attempt(self, case: Case) -> None:
        """Try one case; raise its violation, unless that is allowed or waived."""
        session: Session | None = None
        try:
            with preserved(), of_property(self.prop.function):
                session = Session(self.implementation, case)
                self.prop.function(session, case)
        except Discard as reason:
            self.discard_reason = str(reason)
        except GpuLost as lost:
            lost.case = case
            raise
        except Violation as violation:
            if session is None:
                raise RuntimeError(violation.message) from violation
            if self._is_failure(session, violation):
                raise
        else:
            self.cases.append(case)
            self.margin = max(self.margin, session.margin)

    def _is_failure(self, session: Session, violation: Violation) -> bool:
        """Return whether a violation is neither allowed nor waived, and keep it unless allowed."""
        if refusal := allowed_refusal(session, self.prop, violation):
            self.discard_reason = refusal
            return False
        case, failure = session.case, (session, violation)
        self.cases.append(case)
        covering = [waiver for waiver in self.waivers if waiver.covers(case, violation.message)]
        for waiver in covering:
            self.waived.setdefault(waiver, failure)
        if covering:
            return False
        hears = _HEARS.get()
        if hears and self.failure is None:
            _HEARS.set(None)  # the first one only
            hears(self.prop, failure)
        self.failure = failure
        self.cases_to_failure = self.cases_to_failure or len(self.cases)
        return True

    def fail_if_tampered(self) -> None:
        """Fail where a call has changed the judge itself, so that no comparison can be trusted."""
        if self.failure:
            return
        try:
            require_never_touched(self.implementation)
        except Violation as violation:
            tried = self.cases or self._plain_cases()[:1]
            self.failure = Session(self.implementation, tried[-1]), violation
            self.waived = {}
            self.cases_to_failure = len(self.cases)

    @property
    def needs_contiguous_inputs(self) -> bool:
        """Whether only the layout of the inputs explains the failure, and other layouts remain."""
        of_layout = self.blocked_by is not None and self.blocked_by.clause == "SHP-7"
        return of_layout and {*DENSE} < {*self.space.domain.layouts}

    def result(self) -> PropertyResult:
        """Return what was found."""
        problem = "" if self.failure or self.fully_waived else self.sensitivity.problem
        if problem and self.implementation.claims.rounding.is_coarse:
            # The judge is not at fault where the bound that is asked for is too wide to tell.
            return PropertyResult(prop=self.prop, discard_reason=TOO_COARSE)
        return PropertyResult(
            prop=self.prop,
            cases=tuple(self.cases),
            discard_reason=self.discard_reason,
            failure=self.failure,
            cases_to_failure=self.cases_to_failure,
            note=self.note,
            blocked_by=self.blocked_by,
            waived=self.waived,
            fully_waived=self.fully_waived,
            margin=self.margin,
            rejections=self.sensitivity.rejections,
            harness_error=f"{self.prop.name}: {problem}" if problem else "",
        )
