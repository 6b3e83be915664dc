"""The engine: hold an implementation to a clause, on boundary cases first, then on cases that Hypothesis draws."""

from __future__ import annotations

import platform
import traceback
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version

import hypothesis
import torch
from hypothesis import Phase, given, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import Domain
from mha.conformance.cases.drawing import boundary_cases, drawn_cases, simpler_cases
from mha.conformance.registry import Property, properties
from mha.conformance.report import Report, Status, Verdict
from mha.conformance.script import script
from mha.conformance.trial import Trial
from mha.conformance.violation import Refusal, Violation
from mha.conformance.waivers import Waiver, find_waiver
from mha.implementations import preflight
from mha.spec import CLAUSES, Implementation
from mha.spec.claims import DEVICES


@dataclass(frozen=True)
class Profile:
    """How far a run goes: examples drawn for each property after the boundary cases, and the longest L and S."""

    examples: int
    longest: int


# Draws near a boundary case that failed: about one in six of them is that case, with nothing made simpler.
SHRINKING = 100
# Half precision can be claimed, but its clauses are not judged yet.
JUDGED_DTYPES = ("float32", "float64")
PROFILES = {"quick": Profile(10, 33), "default": Profile(40, 260), "thorough": Profile(1000, 520)}


def check(
    implementation: Implementation,
    profile: str = "default",
    seed: int = 0,
    *,
    clauses: Collection[str] | None = None,
    dtypes: Collection[str] = ("float32", "float64"),
    devices: Collection[str] = ("cpu",),
    waivers: Collection[Waiver] = (),
) -> Report:
    """Hold an implementation to the contract, without pytest.

    profile: "quick", "default" or "thorough". seed: of the cases; one seed gives the same cases and verdicts.
    clauses: ids; all that have a property unless given. dtypes, devices: names as in torch.
    waivers: known departures, none by default; one that no longer departs is a `stale_waiver`.
    Raises ValueError for a word that is not known, for a device that is not there, and for an
    adapter that does not fit what it adapts.
    """
    validate_choice("profile", [profile], PROFILES)
    validate_choice("clause", clauses or (), properties())
    validate_choice("dtype", dtypes, JUDGED_DTYPES)
    validate_devices(devices)
    preflight(implementation)
    verdicts = [
        judge(implementation, clause, dtype=dtype, device=device, profile=profile, seed=seed, waivers=waivers)
        for device in devices
        for dtype in dtypes
        for clause in properties()
        if clauses is None or clause in clauses
    ]
    return Report(verdicts=tuple(verdicts), profile=profile, seed=seed, versions=versions())


def judge(
    implementation: Implementation,
    clause: str,
    *,
    dtype: str,
    device: str,
    profile: str = "default",
    seed: int = 0,
    waivers: Collection[Waiver] = (),
) -> Verdict:
    """Return the verdict on one clause; whatever goes wrong in the judge itself is a harness error."""
    waiver = find_waiver(waivers, implementation.name, clause)
    claims, examples, margin, reasons = implementation.claims, 0, 0.0, []
    about = {"implementation": implementation.name, "clause": clause, "level": CLAUSES[clause].level}
    about |= {"dtype": dtype, "device": device}

    def verdict(status: Status, case: str | None = None, message: str = "", script: str | None = None) -> Verdict:
        found = {"status": status, "case": case, "message": message, "script": script}
        return Verdict(**about, **found, examples=examples, margin=margin)  # type: ignore[arg-type]  # str by field

    if dtype not in claims.dtypes or device not in claims.devices:
        return verdict("not_claimed", message=f"{dtype} on {device} is not claimed")
    for prop in properties()[clause]:
        domain = prop.within(claims, dtype)
        if isinstance(domain, str):
            reasons.append(domain)
            continue
        search = Search(implementation, prop, domain, dtype, device, PROFILES[profile], seed, shrink=waiver is None)
        try:
            with one_thread():
                search.run()
        except Exception:
            return verdict("harness_error", message=f"{prop.name}: {traceback.format_exc()}")
        finally:
            examples, margin = examples + search.examples, max(margin, search.margin)
        if search.failure:
            trial, violation = search.failure
            refused = isinstance(violation, Refusal) and isinstance(violation.error, NotImplementedError)
            status: Status = "waived" if waiver else "refused" if refused else "fail"
            reason = f" [waived: {waiver.reason}]" if waiver else ""
            text = f"{violation.message}{search.remark}{reason}"
            return verdict(status, repr(trial.case), text, script(trial, clause, violation))
    if not examples:
        return verdict("not_claimed", message="; ".join(reasons))
    if waiver:
        return verdict("stale_waiver", message=f"nothing departs from this clause; delete its waiver: {waiver.reason}")
    return verdict("pass")


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: the problems are small, and the bits must not depend on the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Search:
    """The search for a violation of one property.

    failure: the trial that fails and its violation; the simplest that was found. remark: what else to say of it.
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
        *,
        shrink: bool,
    ) -> None:
        self.implementation, self.prop, self.profile, self.shrink = implementation, prop, profile, shrink
        self.where = (domain, implementation.claims, dtype, device, profile.longest)
        self.seed = zlib.crc32(f"{seed}:{prop.clause}:{prop.name}:{dtype}:{device}".encode())
        self.failure: tuple[Trial, Violation] | None = None
        self.remark = ""
        self.examples = 0
        self.margin = 0.0

    def run(self) -> None:
        """Try the boundary cases; shrink the first that fails, or else let Hypothesis draw, and shrink what fails."""
        for case in boundary_cases(*self.where):
            try:
                self.attempt(case)
            except Violation:
                break
        if not self.failure:
            self.draw(drawn_cases(*self.where), self.profile.examples)
        elif self.shrink:
            self.draw(simpler_cases(*self.where, case), SHRINKING)

    def attempt(self, case: Case) -> None:
        """Try one case; a violation is kept, with its trial, and raised."""
        self.examples += 1
        trial = Trial(self.implementation, case)
        try:
            self.prop.check(trial, case)
        except Violation as violation:
            if isinstance(violation, Refusal) and case.causal and case.L != case.S and self.prop.clause != "CAU-3":
                return  # CAU-3 allows such a call to be refused
            self.failure = trial, violation
            raise
        self.margin = max(self.margin, trial.margin)

    def draw(self, cases: SearchStrategy[Case], examples: int) -> None:
        """Let Hypothesis draw cases up to the first failure, and shrink that one; the last failure is the simplest."""

        @hypothesis.seed(self.seed)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            print_blob=False,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink) if self.shrink else (Phase.generate,),
        )
        @given(cases)
        def drawn(case: Case) -> None:
            self.attempt(case)

        try:
            drawn()
        except Violation:
            return
        except Flaky:
            self.remark = "; the same case did not fail every time, so a call depends on what came before it"


def validate_choice(what: str, given: Collection[str], known: Collection[str]) -> None:
    """Raise ValueError unless every word is known."""
    for word in given:
        if word not in known:
            raise ValueError(f"there is no {what} {word!r}; known are {', '.join(known)}")


def validate_devices(devices: Collection[str]) -> None:
    """Raise ValueError unless every device is known and there."""
    validate_choice("device", devices, DEVICES)
    if "cuda" in devices and not torch.cuda.is_available():
        raise ValueError("the device 'cuda' was asked for, but torch finds no CUDA device here; judge on 'cpu'")


def versions() -> dict[str, str]:
    """Return the versions that a verdict may depend on."""
    packages = {name: version(name) for name in ("mha-conformance", "torch", "hypothesis")}
    return packages | {"python": platform.python_version()}
