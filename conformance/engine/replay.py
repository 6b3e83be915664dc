"""Failures run again as they are, without Hypothesis."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import Domain
from mha.conformance.cases.parsing import read_case
from mha.conformance.engine.preconditions import allowed_refusal
from mha.conformance.harness.errors import AdapterError, Discard, GpuLost, Violation
from mha.conformance.harness.integrity import judging, require_never_touched
from mha.conformance.harness.isolation import of_property
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import Property, properties
from mha.conformance.results import NONCONFORMING, Report, Verdict
from mha.conformance.settings import validate_devices
from mha.implementations import resolve
from mha.implementations.process.torch_state import threads
from mha.spec import Implementation

Outcome = Literal["FAILS", "FIXED", "INAPPLICABLE"]


class Replay(NamedTuple):
    """What became of a failure; INAPPLICABLE where the property discards the case.

    message: why it is not FIXED.
    """

    outcome: Outcome
    message: str


def failures(report: Report, clauses: Collection[str] = ()) -> list[Verdict]:
    """Return the verdicts that failed or were waived and have a case; clauses: all if empty."""
    found = []
    for verdict in report.verdicts:
        has_failed = verdict.status in (*NONCONFORMING, "waived") and verdict.case
        if has_failed and (not clauses or verdict.clause in clauses):
            found.append(verdict)
    return found


def replay_verdicts(
    report: Report, verdicts: Collection[Verdict], target: str = ""
) -> Iterator[tuple[Verdict, Replay]]:
    """Run failures again, with the implementation that the report names or with another one.

    Raises ValueError where the report does not say how an implementation was named, or a case
    cannot be read.
    """
    known: dict[str, Implementation] = {}
    for verdict in verdicts:
        named = target or report.targets.get(verdict.implementation, "")
        if not named:
            raise ValueError(
                f"the report does not say where {verdict.implementation!r} is; name it with --impl"
            )
        if named not in known:
            known[named] = one_of(named)
        validate_devices([verdict.device])
        case = replace(read_case(verdict.case or ""), dtype=verdict.dtype, device=verdict.device)
        yield verdict, replay_case(known[named], verdict.clause, case, violated=verdict.violated)


def one_of(target: str) -> Implementation:
    """Return the implementation that a target names; raises ValueError if there are several."""
    resolved = resolve(target)
    if len(resolved) != 1:
        raise ValueError(f"{target!r} names {len(resolved)} implementations; name one")
    return resolved[0].implementation


def replay_case(
    implementation: Implementation, clause: str, case: Case, *, violated: str = ""
) -> Replay:
    """Try one case on the property that it violated, or if that is unknown, on all of the clause.

    Raises ValueError for a clause without properties.
    """
    if clause not in properties():
        raise ValueError(f"unknown clause {clause!r}; `mha spec` lists them")
    known = properties()[clause]
    members = [prop for prop in known if prop.name == violated] or [*known]
    claims = implementation.claims
    claimed = [prop for prop in members if isinstance(prop.within(claims, case.dtype), Domain)]
    inapplicable = None
    for prop in claimed or members:
        replay = _tried(implementation, prop, case)
        if replay.outcome == "FAILS":
            return replay
        if replay.outcome == "INAPPLICABLE":
            inapplicable = replay
    return inapplicable or Replay("FIXED", "")


def _tried(implementation: Implementation, prop: Property, case: Case) -> Replay:
    domain = prop.within(implementation.claims, case.dtype)
    if not isinstance(domain, Domain):
        return Replay("INAPPLICABLE", str(domain))
    session = Session(implementation, case)
    try:
        with threads(1), judging(implementation), of_property(prop.function):
            prop.function(session, case)
        require_never_touched(implementation)
    except (Discard, AdapterError) as reason:
        return Replay("INAPPLICABLE", str(reason))
    except (Violation, GpuLost) as failed:
        refusal = allowed_refusal(session, prop, failed) if isinstance(failed, Violation) else ""
        if refusal:
            return Replay("INAPPLICABLE", refusal)
        return Replay("FAILS", failed.message)
    except Exception as error:  # the property does not take every case that a user may write
        why = f"the clause cannot be judged on this case ({type(error).__name__})"
        return Replay("INAPPLICABLE", why)
    return Replay("FIXED", "")
