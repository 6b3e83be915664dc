"""The search for a failure of one property: boundary cases first, then random ones, and shrinking."""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from mha.conformance.cases.boundary import boundary_cases, varied
from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import DENSE, CaseSpace, Domain
from mha.conformance.cases.reasons import NotApplicable, Reason
from mha.conformance.cases.strategies import drawn_cases, simpler_cases
from mha.conformance.engine.constants import only_readable_modules
from mha.conformance.engine.preconditions import (
    BASIC,
    FailedPrecondition,
    failed_layout,
    failed_precondition,
    plain_cases,
    refuses_layout,
)
from mha.conformance.engine.sensitivity import Sensitivity
from mha.conformance.harness.errors import (
    CALL,
    AdapterError,
    CallRaised,
    Discard,
    GpuLost,
    Violation,
)
from mha.conformance.harness.global_state import observe_first_call
from mha.conformance.harness.integrity import judging, require_never_touched
from mha.conformance.harness.isolation import gpu_is_lost, of_property
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import Property, properties
from mha.conformance.results import Rejections
from mha.conformance.settings import Profile, Settings
from mha.conformance.sharding.group import RankError
from mha.conformance.waivers import Waiver
from mha.implementations import UnsupportedCallError
from mha.implementations.process.torch_state import preserved, threads
from mha.spec import Implementation

TOO_COARSE = "with the rounding that is declared, wrong answers are within the bound"
FLAKY = "the same case did not fail every time, so a call depends on earlier calls"
MAY_REFUSE = "the call with a causal flag and L != S is refused, which CAU-3 allows"
LAYOUT_REFUSED = "the call with inputs that are not contiguous is refused, which SHP-7 allows"
CONTIGUOUS_ONLY = "judged on contiguous inputs alone, since others fail SHP-7"
# Cases between a failing boundary case and the simplest one: about one in six is the failing case
# itself.
SHRINKING = 100

Failure = tuple[Session, Violation]


@dataclass(frozen=True, kw_only=True)
class PropertyResult:
    """What the search for a failure of one property found.

    not_applicable: why no case applies; then nothing else is set. cases: those tried, without
        discarded ones.
    discard_reason: why a case was discarded. failure: the simplest failure found, which no waiver
        covers.
    cases_to_failure: how many cases it took. note: what to add to its message. blocked_by: what
        explains the failure.
    waived: the first failure that each waiver covers. fully_waived: whether a waiver covers
        whatever else would be found. margin: the largest error/bound. rejections: of known-bad
        answers.
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


def run_property(
    implementation: Implementation,
    prop: Property,
    dtype: str,
    device: str,
    settings: Settings,
    waivers: Collection[Waiver] = (),
) -> PropertyResult:
    """Search for a failure of a property; an exception of property, judge or adapter is a harness
    error.

    Raises GpuLost if a call ends the use of the GPU by this process.
    """
    domain = prop.within(implementation.claims, dtype)
    if not isinstance(domain, Domain):
        return PropertyResult(prop=prop, not_applicable=domain)
    limits = settings.limits
    if prop.slow and not limits.slow:
        slow = NotApplicable(f"{prop.name} is too slow for the profile {settings.profile}")
        return PropertyResult(prop=prop, not_applicable=slow)
    domain = domain.up_to(limits.ranks)
    longest = limits.long_rows if domain.scale == "long" else limits.longest
    space = CaseSpace(domain, implementation.claims, dtype, device, longest)
    both = (
        dtype == "float64"
        and "float32" in settings.dtypes
        and "float32" in implementation.claims.dtypes
    )
    budget = Budget.of(prop, limits, every=limits.float64_every if both else 1)
    try:
        search = _searched(implementation, prop, space, budget, settings, waivers)
    except AdapterError as error:
        hint = (
            "; claim less, or pass call=..."
            if isinstance(error.error, UnsupportedCallError)
            else ""
        )
        return PropertyResult(prop=prop, harness_error=f"{prop.name}: {error.message}{hint}")
    except Exception as error:
        if gpu_is_lost():
            raise GpuLost(f"the judge raised {error!r}") from error
        return PropertyResult(
            prop=prop, harness_error=f"{prop.name}: {error!r}\n{traceback.format_exc()}"
        )
    return search.result()


def _searched(
    implementation: Implementation,
    prop: Property,
    space: CaseSpace,
    budget: Budget,
    settings: Settings,
    waivers: Collection[Waiver],
) -> Search:
    """Return a search that has been run: on contiguous inputs alone, if only those of other layouts
    fail.
    """
    search = Search(implementation, prop, space, budget, seed=settings.seed, waivers=waivers)
    with threads(1), judging(implementation):
        observe_first_call(
            implementation, plain_cases(implementation.claims, space.dtype, space.device)[0]
        )
        search.run()
        if search.needs_contiguous_inputs and _layouts_fail(
            implementation, space.dtype, space.device, settings
        ):
            dense = replace(space, domain=replace(space.domain, layouts=DENSE))
            waived = search.waived
            search = Search(
                implementation, prop, dense, budget, seed=settings.seed, waivers=waivers
            )
            search.note, search.waived = CONTIGUOUS_ONLY, waived
            search.run()
    search.fail_if_tampered()
    return search


# Whether SHP-7 fails, by what is judged; implementations are kept alive, so that no id is used
# again.
_failing_layouts: dict[tuple[int, str, str, str, int], tuple[Implementation, bool]] = {}


def _layouts_fail(
    implementation: Implementation, dtype: str, device: str, settings: Settings
) -> bool:
    """Return whether SHP-7 is judged in the same run, and fails."""
    if "SHP-7" not in settings.judged_clauses:
        return False
    key = id(implementation), dtype, device, settings.profile, settings.seed
    if key not in _failing_layouts:
        results = (
            run_property(implementation, prop, dtype, device, settings)
            for prop in properties()["SHP-7"]
        )
        failing = any(result.failure and not result.blocked_by for result in results)
        _failing_layouts[key] = implementation, failing
    return _failing_layouts[key][1]


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
    """The state of a search; see `PropertyResult` for what it collects."""

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
        self.implementation, self.prop, self.space, self.budget = (
            implementation,
            prop,
            space,
            budget,
        )
        self.waivers = waivers
        key = f"{seed}:{prop.clause}:{prop.number}:{space.dtype}:{space.device}"
        self.seed = zlib.crc32(key.encode())
        self.sensitivity = Sensitivity(prop, implementation.claims)
        self.cases: list[Case] = []
        self.failure: Failure | None = None
        self.waived: dict[Waiver, Failure] = {}
        self.blocked_by: FailedPrecondition | None = None
        self.discard_reason = self.note = ""
        self.margin, self.cases_to_failure = 0.0, 0

    @property
    def fully_waived(self) -> bool:
        """Whether a waiver covers whatever else would be found."""
        return any(not waiver.partial for waiver in self.waived)

    @property
    def needs_contiguous_inputs(self) -> bool:
        """Whether the layout of the inputs alone explains the failure, and there are cases without
        that.
        """
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

    def run(self) -> None:
        """Try the boundary cases, then random ones, up to the first failure, which is shrunk."""
        failing = self._try_all(self._boundary())
        if failing:
            if self._worth_shrinking():
                simpler = simpler_cases(self.space, failing)
                self.draw(simpler, min(SHRINKING, 4 * self.prop.max_cases), shrink=True)
                self._find_block()
            return
        if self.budget.examples and not self.fully_waived:
            self.draw(drawn_cases(self.space), self.budget.examples, shrink=False)
        if self.fully_waived:
            return
        if self.failure is None:
            if self.budget.sensitivity:
                self.sensitivity.sample(self.cases)
        elif self._worth_shrinking():
            first = self.failure
            self.draw(drawn_cases(self.space), self.budget.examples, shrink=True)
            self.note = FLAKY if self.failure is first else self.note
            self._find_block()

    def fail_if_tampered(self) -> None:
        """Fail where what was tried has changed the judge itself, so that no comparison can be
        trusted.
        """
        if self.failure:
            return
        try:
            require_never_touched(self.implementation)
        except Violation as violation:
            space = self.space
            case = (
                self.cases[-1]
                if self.cases
                else plain_cases(space.claims, space.dtype, space.device)[0]
            )
            self.failure, self.waived = (Session(self.implementation, case), violation), {}
            self.cases_to_failure = len(self.cases)

    def attempt(self, case: Case) -> None:
        """Try one case; a violation is kept with its session and raised, unless it is allowed or
        waived.
        """
        session: Session | None = None
        try:
            with preserved(), of_property(self.prop.function):
                session = Session(self.implementation, case)
                self.prop.function(session, case)
        except Discard as reason:
            self.discard_reason = str(reason)
            return
        except GpuLost as lost:
            lost.case = case
            raise
        except Violation as violation:
            if session is None:
                raise RuntimeError(violation.message) from violation
            if refusal := allowed_refusal(session, self.prop, violation):
                self.discard_reason = refusal
                return
            self.cases.append(case)
            covering = [waiver for waiver in self.waivers if waiver.covers(case, violation.message)]
            for waiver in covering:
                self.waived.setdefault(waiver, (session, violation))
            if covering:
                return
            self.failure = session, violation
            self.cases_to_failure = self.cases_to_failure or len(self.cases)
            raise
        self.cases.append(case)
        self.margin = max(self.margin, session.margin)

    def draw(self, cases: SearchStrategy[Case], examples: int, *, shrink: bool) -> None:
        """Let Hypothesis draw cases up to the first failure, and shrink it; the last failure is the
        simplest.
        """

        @hypothesis.seed(self.seed)
        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            print_blob=False,
            report_multiple_bugs=False,
            suppress_health_check=[
                HealthCheck.too_slow
            ],  # a busy machine is no fault of the strategy
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

    def _boundary(self) -> list[Case]:
        cases = boundary_cases(self.space, self.budget.boundary)
        cases = varied(cases, ceil(min(self.budget.boundary, len(cases)) / self.budget.every))
        if self.prop.clause in BASIC:  # so that what blocks other clauses is a failure of its own
            space = self.space
            cases = [*plain_cases(space.claims, space.dtype, space.device), *cases]
        return cases

    def _try_all(self, cases: Sequence[Case]) -> Case | None:
        """Try cases in turn; return the first that fails."""
        for case in cases:
            if self.fully_waived:
                return None
            try:
                self.attempt(case)
            except Violation:
                return case
        return None

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


def allowed_refusal(session: Session, prop: Property, violation: Violation) -> str:
    """Return why a violation is a refusal that the contract allows, empty if it is none.

    CAU-3 allows it for a causal call with L != S, and SHP-7 for inputs that are not contiguous, if
    the same call with contiguous inputs does not raise.
    """
    if not isinstance(violation, CallRaised) or violation.what != CALL:
        return ""
    if isinstance(violation.error, RankError):  # not by every rank
        return ""
    case = session.case
    if prop.may_refuse and case.causal and case.L != case.S:
        return MAY_REFUSE
    if prop.clause != "SHP-7" and refuses_layout(session):
        return LAYOUT_REFUSED
    return ""
