"""The verdict that the results of the properties of a clause add up to, with its waivers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from mha.conformance.engine.search import Failure, PropertyResult
from mha.conformance.harness.errors import CallRaised
from mha.conformance.properties.registry import Property
from mha.conformance.results import Rejections, Status, Verdict
from mha.conformance.scripts.reproduction import script
from mha.conformance.waivers import Waiver
from mha.spec import CLAUSES

# Clauses that are about more than accuracy: a failure by a few roundings is one of NUM-1, if that
# fails too.
ACCURATE = ("SMX-5", "SMX-6", "EQV-5", "EQV-6", "HED-4")


def verdict_of(
    verdict: Verdict,
    results: Sequence[PropertyResult],
    waivers: Sequence[Waiver],
    *,
    requires: Callable[[str, str], bool],
    few: bool = False,
    target: str = "",
) -> Verdict:
    """Return the verdict that the results of the properties of a clause add up to.

    verdict: a pass, with what is known before anything is run.
    results: in order; only the last one can decide the clause by itself.
    waivers: of the clause, none of them expired.
    requires: as in `Settings`.
    few: whether too few cases were tried to call a waiver stale.
    target: how the implementation was named, for scripts.
    """
    last, tried = results[-1], sum(len(result.cases) for result in results)
    verdict = replace(verdict, examples=tried, margin=max(result.margin for result in results))
    if last.failure:
        return replace(
            _failed(verdict, last, waivers, target),
            cases_to_failure=tried - len(last.cases) + last.cases_to_failure,
            required=requires(last.prop.clause, last.prop.level),
        )
    if last.harness_error:
        return replace(verdict, status="harness_error", message=last.harness_error)
    verdict = replace(verdict, rejections=_rejections(results))
    if waivers:
        return _with_waivers(verdict, results, waivers, few=few, target=target)
    if tried:
        return replace(verdict, status="pass", message=_reasons(results))
    return replace(verdict, status="not_claimed", message=_reasons(results), topic=_topic(results))


def _failed(
    verdict: Verdict, result: PropertyResult, waivers: Sequence[Waiver], target: str
) -> Verdict:
    """Return the verdict on a clause one of whose properties failed."""
    assert result.failure is not None
    _, violation = result.failure
    message = "; ".join(filter(None, (violation.message, result.note)))
    if waivers:
        message += f" [not covered by its waiver: {waivers[0].reason}]"
    verdict = _shown(verdict, result.prop, result.failure, target)
    refused = isinstance(violation, CallRaised) and isinstance(violation.error, NotImplementedError)
    status: Status = "refused" if refused else "fail"
    if root := result.blocked_by:
        message += f" [{root.message}]"
    cause = root.clause if root else _cause(result.prop, result.failure)
    return replace(verdict, status=status, message=message, blocked_by=cause)


def _cause(prop: Property, failure: Failure) -> str | None:
    """Return the clause or family that explains a failure by the kind of the violation, if any."""
    _, violation = failure
    other_family = violation.family and violation.family != CLAUSES[prop.clause].family
    if other_family and not prop.builds_a_variant:
        return violation.family
    if violation.is_rounding and prop.clause in ACCURATE:
        return "NUM-1"
    return None


def _shown(verdict: Verdict, prop: Property, failure: Failure, target: str) -> Verdict:
    """Return a verdict with the property that failed, its case, and the script of the failure."""
    session, violation = failure
    return replace(
        verdict,
        level=prop.level,
        case=repr(session.case),
        violated=prop.name,
        script=script(session, prop.clause, violation, target=target),
    )


def _with_waivers(
    verdict: Verdict,
    results: Sequence[PropertyResult],
    waivers: Sequence[Waiver],
    *,
    few: bool,
    target: str,
) -> Verdict:
    """Return the verdict on a clause that fails nowhere, or only where a waiver accepts it."""
    if not verdict.examples:
        reason = f"nothing is judged: {_reasons(results)}; delete its waiver: {waivers[0].reason}"
        return _stale(verdict, reason)
    waived: dict[Waiver, tuple[Property, Failure]] = {}
    for result in results:
        own = {waiver: (result.prop, failure) for waiver, failure in result.waived.items()}
        waived = own | waived  # of each waiver, the first failure
    few = few or any(result.prop.slow and not result.cases for result in results)
    unneeded = _unneeded(waivers, waived, results)
    if unneeded and not few:
        said = " as the waiver says" if unneeded.partial else ""
        return _stale(
            verdict, f"the clause does not fail{said}; delete its waiver: {unneeded.reason}"
        )
    for waiver, (prop, failure) in waived.items():
        message = f"{failure[1].message} [waived: {waiver.reason}]"
        verdict = _shown(verdict, prop, failure, target)
        return replace(verdict, status="waived", message=message)
    if unneeded:
        message = f"no case that was tried needs its waiver: {unneeded.reason}"
    else:
        message = f"no case matches its waiver: {waivers[0].where}"
    return replace(verdict, message=message)


def _unneeded(
    waivers: Sequence[Waiver], waived: Collection[Waiver], results: Sequence[PropertyResult]
) -> Waiver | None:
    """Return a waiver of cases that were tried, none of which failed."""
    if any(not waiver.partial for waiver in waived):
        return None
    for waiver in waivers:
        if waiver not in waived and _matches(waiver, results):
            return waiver
    return None


def _matches(waiver: Waiver, results: Sequence[PropertyResult]) -> bool:
    """Return whether a waiver is about a case that was tried, in a search that ran to its end."""
    ended = [result for result in results if not result.fully_waived]
    return any(waiver.holds(case) for result in ended for case in result.cases)


def with_expired(verdict: Verdict, waivers: Sequence[Waiver]) -> Verdict:
    """Report a waiver that has expired, and waives nothing: it is stale where nothing fails."""
    for waiver in waivers:
        if waiver.expired:
            since = f"expired on {waiver.expires}: {waiver.reason}"
            if verdict.status in ("fail", "refused", "harness_error"):
                return replace(verdict, message=f"{verdict.message} [its waiver {since}]")
            return _stale(verdict, f"delete its waiver, which {since}")
    return verdict


def _stale(verdict: Verdict, message: str) -> Verdict:
    """Return a verdict that asks to delete a waiver."""
    return replace(verdict, status="stale_waiver", required=True, message=message)


def _rejections(results: Sequence[PropertyResult]) -> dict[str, Rejections]:
    """Return how often the cases of all properties rejected each known-bad answer."""
    total: dict[str, Rejections] = {}
    for result in results:
        for name, count in result.rejections.items():
            total[name] = total.get(name, Rejections(0, 0)) + count
    return dict(sorted(total.items()))


def _reasons(results: Sequence[PropertyResult]) -> str:
    """Return why properties were not judged, or not on all cases, each reason once."""
    reasons: list[str] = []
    for result in results:
        if result.not_applicable:
            reasons.append(str(result.not_applicable))
        else:
            reasons.append(result.note if result.cases else result.discard_reason)
    return "; ".join(dict.fromkeys(filter(None, reasons)))


def _topic(results: Sequence[PropertyResult]) -> str:
    """Return what reports count the first reason under."""
    for result in results:
        if result.not_applicable:
            return result.not_applicable.topic
    return ""
