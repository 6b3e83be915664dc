"""The judge: a verdict on each clause."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from time import perf_counter

import torch

from mha.conformance.cases.reasons import OTHER_DTYPES, NotApplicable
from mha.conformance.diagnosis.arguments import arguments_of
from mha.conformance.diagnosis.diagnose import diagnose
from mha.conformance.diagnosis.steps import first_wrong_step
from mha.conformance.engine.report import not_covered, report_of_run
from mha.conformance.engine.search import Failure, PropertyResult, run_property
from mha.conformance.harness.errors import CallRaised, GpuLost
from mha.conformance.harness.integrity import look_again
from mha.conformance.harness.isolation import contained, gpu_is_lost, heeding_interrupts
from mha.conformance.harness.known_bad.advice import fix_of
from mha.conformance.properties.registry import Property, needs_ranks, properties
from mha.conformance.results import Rejections, Report, Status, Verdict, now
from mha.conformance.scripts.reproduction import script
from mha.conformance.settings import Settings, Task
from mha.conformance.sharding.gathered import runs_on_ranks_only
from mha.conformance.waivers import Waiver, waivers_for
from mha.implementations import Resolved, preflight
from mha.implementations.discovery.resolve import as_resolved
from mha.implementations.process.pristine import torch_changes
from mha.spec import CLAUSES, Implementation

# Clauses that are about more than accuracy: a failure by a few roundings is one of NUM-1, if that
# fails too.
ACCURATE = ("SMX-5", "SMX-6", "EQV-5", "EQV-6", "HED-4")


def check(  # noqa: PLR0913  the public options
    implementation: object,
    profile: str | None = None,
    seed: int = 0,
    *,
    clauses: str | Collection[str] = (),
    dtypes: str | torch.dtype | Collection[str | torch.dtype] | None = None,
    devices: str | Collection[str] | None = None,
    waivers: Collection[Waiver] | None = None,
    strict: bool = False,
    require: str | Collection[str] = (),
) -> Report:
    """Judge an implementation, without pytest; the answer is that of `mha check` and `pytest
    conformance`.

    implementation: what `mha check` takes: an implementation, a plain module class, a function that
        makes a module or computes attention, or the name or place of one of these. clauses,
        require: ids or families. The other options are the fields of
        `mha.conformance.settings.Settings`. What is not given is as `[tool.mha]` in the
        pyproject.toml of the current folder, or of the next one above it, says.

    Raises ValueError for an unknown word, also in `[tool.mha]`, for a device that is not available,
    for what is not an implementation, and for an adapter that does not fit what it adapts.

    >>> check("sdpa", "quick", clauses="SHP-1", dtypes=torch.float32).conforms
    True
    """
    given = Settings.of(
        profile, seed, clauses, dtypes, devices, waivers, strict=strict, require=require
    )
    look_again()
    resolved = resolve_object(implementation)
    settings = given.of_target(resolved)
    started, targets = now(), {resolved.implementation.name: resolved.target}
    changes = torch_changes()
    verdicts = judge_all(resolved, settings)
    report = report_of_run(settings, verdicts, targets=targets, started=started)
    return replace(report, torch_changes=changes, not_covered=not_covered([resolved]))


def resolve_object(value: object) -> Resolved:
    """Return what a value stands for; warn of a class that is read as what it is nearest to. Raises
    as `check` does.
    """
    resolved = as_resolved(value)
    preflight(resolved.implementation)
    given = isinstance(value, Resolved)  # whose reading the caller has
    inference = resolved.inference
    if (
        inference
        and not given
        and any(row.evidence.startswith("assumed") for row in inference.rows)
    ):
        reading = (
            f"{resolved.implementation.name} is read as what it is nearest"
            f" to:\n{inference.report()}"
        )
        warnings.warn(reading, stacklevel=3)
    return resolved


def judge_all(resolved: Resolved, settings: Settings) -> Iterator[Verdict]:
    """Yield the verdicts on an implementation one after another."""
    for task in settings.tasks:
        yield judge(resolved, *task, settings)


def judge(
    resolved: Resolved,
    clause: str,
    dtype: str,
    device: str,
    settings: Settings,
    *,
    diagnosed: bool = True,
) -> Verdict:
    """Return the verdict on one clause; whatever goes wrong in the judge itself is a harness error.

    It is never "blocked": whether what explains a failure fails too is known at the end of a run
        (`results.settled`).
    diagnosed: whether to look for the defect behind a failure, which takes a while.
    """
    start = perf_counter()
    implementation = resolved.implementation
    waivers = waivers_for(
        settings.waivers_of(implementation), implementation.name, clause, dtype, device
    )
    verdict = _passed(implementation.name, Task(clause, dtype, device), settings)
    if unclaimed := _unclaimed(implementation, clause, dtype, device):
        verdict = replace(
            verdict, status="not_claimed", message=str(unclaimed), topic=unclaimed.topic
        )
    elif gpu_is_lost():  # then no call can be waited for, not even on the CPU
        reason = (
            "not judged: this process can no longer use its GPU after an earlier call; mha check"
            " replaces it"
        )
        verdict = replace(verdict, status="harness_error", message=reason)
    else:
        valid = [waiver for waiver in waivers if not waiver.expired]
        with heeding_interrupts():
            verdict = _judged(verdict, resolved, settings, valid, diagnosed=diagnosed)
    verdict = _with_expired(verdict, waivers)
    return replace(verdict, seconds=round(perf_counter() - start, 3))


def _judged(
    verdict: Verdict,
    resolved: Resolved,
    settings: Settings,
    waivers: Sequence[Waiver],
    *,
    diagnosed: bool,
) -> Verdict:
    """Return the verdict once the properties of its clause are run; waivers: of the clause, none of
    them expired.
    """
    where = verdict.clause, verdict.dtype, verdict.device
    try:
        results = _results(resolved.implementation, *where, settings, waivers)
    except GpuLost as lost:
        return _lost(verdict, lost, waivers)
    few = settings.limits.is_partial
    verdict = verdict_of(
        verdict, results, waivers, requires=settings.requires, few=few, target=resolved.target
    )
    if diagnosed and verdict.status == "fail" and not verdict.blocked_by:
        return _explained(verdict, results[-1])
    return verdict


def stopped(
    resolved: Resolved, task: Task, settings: Settings, reason: str, *, status: Status = "fail"
) -> Verdict:
    """Return the verdict where judging did not end: the process crashed, or ran out of time."""
    implementation = resolved.implementation
    waivers = waivers_for(settings.waivers_of(implementation), implementation.name, *task)
    message, whole = (
        f"judging did not end: {reason}",
        next((x for x in waivers if not (x.expired or x.partial)), None),
    )
    if whole and status == "fail":
        status, message = "waived", f"{message} [waived: {whole.reason}]"
    verdict = replace(_passed(implementation.name, task, settings), status=status, message=message)
    return _with_expired(verdict, waivers)


def not_judged(resolved: Resolved, task: Task, settings: Settings, reason: str) -> Verdict:
    """Return the verdict on a clause that was due, and was not judged."""
    verdict = _passed(resolved.implementation.name, task, settings)
    return replace(verdict, status="harness_error", message=f"not judged: {reason}")


def _lost(verdict: Verdict, lost: GpuLost, waivers: Collection[Waiver]) -> Verdict:
    """Return the verdict where a call ended the use of the GPU by this process; what it held there
    cannot be shown.
    """
    message = f"{lost.message}, and its process can no longer use the GPU"
    verdict = replace(
        verdict, status="fail", case=repr(lost.case) if lost.case else None, message=message
    )
    covering = next(
        (each for each in waivers if lost.case and each.covers(lost.case, message)), None
    )
    return (
        replace(verdict, status="waived", message=f"{message} [waived: {covering.reason}]")
        if covering
        else verdict
    )


def _passed(name: str, task: Task, settings: Settings) -> Verdict:
    """Return the verdict before anything is run; name: of the implementation."""
    level = CLAUSES[task.clause].level
    required = settings.requires(task.clause, level)
    return Verdict(
        implementation=name, level=level, required=required, status="pass", **task._asdict()
    )


def _results(
    implementation: Implementation,
    clause: str,
    dtype: str,
    device: str,
    settings: Settings,
    waivers: Collection[Waiver],
) -> list[PropertyResult]:
    """Run the properties of a clause, those of a SHOULD last, up to one that decides it."""
    results: list[PropertyResult] = []
    for prop in sorted(properties()[clause], key=lambda prop: prop.level == "SHOULD"):
        results.append(run_property(implementation, prop, dtype, device, settings, waivers))
        if results[-1].ends:
            break
    return results


def _explained(verdict: Verdict, result: PropertyResult) -> Verdict:
    """Return a failure with its last call, and the defect that explains it, or else its first wrong
    step.
    """
    assert result.failure is not None
    session, violation = result.failure
    with contained():  # the verdict stands without it
        verdict = replace(verdict, arguments=arguments_of(session))
    if isinstance(violation, CallRaised):
        return verdict
    with contained():
        diagnosis = diagnose(result.prop, session)
        steps = "" if diagnosis else first_wrong_step(result.prop, session)
        verdict = replace(verdict, diagnosis=diagnosis, fix=fix_of(diagnosis), steps=steps)
    return verdict


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

    verdict: a pass, with what is known before anything is run. results: in order; only the last one
    can decide the clause alone. waivers: of the clause, none of them expired. requires: as in
    `Settings`. few: whether too few cases were tried to call one stale.
    """
    last, tried = results[-1], sum(len(result.cases) for result in results)
    verdict = replace(verdict, examples=tried, margin=max(result.margin for result in results))
    if last.failure:
        verdict = replace(verdict, cases_to_failure=tried - len(last.cases) + last.cases_to_failure)
        verdict = replace(verdict, required=requires(last.prop.clause, last.prop.level))
        return _failed(verdict, last, waivers, target=target)
    if last.harness_error:
        return replace(verdict, status="harness_error", message=last.harness_error)
    verdict = replace(verdict, rejections=_rejections(results))
    if waivers:
        return _with_waivers(verdict, results, waivers, few=few, target=target)
    status: Status = "pass" if tried else "not_claimed"
    return replace(
        verdict, status=status, message=_reasons(results), topic="" if tried else _topic(results)
    )


def _unclaimed(
    implementation: Implementation, clause: str, dtype: str, device: str
) -> NotApplicable | None:
    claims = implementation.claims
    if runs_on_ranks_only(implementation) and not needs_ranks(clause):
        return NotApplicable("it runs on ranks only; pass unsharded= for what it is without them")
    if dtype in claims.dtypes and device in claims.devices:
        return None
    claimed = f"{', '.join(sorted(claims.dtypes))} on {', '.join(sorted(claims.devices))}"
    return NotApplicable(f"{dtype} on {device} is not claimed; claimed: {claimed}", OTHER_DTYPES)


def _failed(
    verdict: Verdict, result: PropertyResult, waivers: Sequence[Waiver], *, target: str
) -> Verdict:
    """Return the verdict on a clause one of whose properties failed."""
    assert result.failure is not None
    prop, (session, violation) = result.prop, result.failure
    refused = isinstance(violation, CallRaised) and isinstance(violation.error, NotImplementedError)
    verdict = replace(
        verdict,
        status="refused" if refused else "fail",
        level=prop.level,
        case=repr(session.case),
        violated=prop.name,
        message="; ".join(filter(None, (violation.message, result.note))),
        script=script(session, prop.clause, violation, target=target),
    )
    if waivers:
        verdict = replace(
            verdict, message=f"{verdict.message} [not covered by its waiver: {waivers[0].reason}]"
        )
    if root := result.blocked_by:
        message = f"{verdict.message} [{root.message}]"
        return replace(verdict, blocked_by=root.clause, message=message)
    if (
        violation.family
        and violation.family != CLAUSES[prop.clause].family
        and not prop.builds_a_variant
    ):
        return replace(verdict, blocked_by=violation.family)
    if violation.is_rounding and prop.clause in ACCURATE:
        return replace(verdict, blocked_by="NUM-1")
    return verdict


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
        message = f"nothing is judged: {_reasons(results)}; delete its waiver: {waivers[0].reason}"
        return replace(verdict, status="stale_waiver", required=True, message=message)
    waived: dict[Waiver, tuple[Property, Failure]] = {}
    for result in results:
        waived = {
            waiver: (result.prop, failure) for waiver, failure in result.waived.items()
        } | waived
    few = few or any(result.prop.slow and not result.cases for result in results)
    unneeded = _unneeded(waivers, waived, results)
    if unneeded and not few:
        said = " as the waiver says" if unneeded.partial else ""
        message = f"the clause does not fail{said}; delete its waiver: {unneeded.reason}"
        return replace(verdict, status="stale_waiver", required=True, message=message)
    if waived:
        return _waived(verdict, waived, target)
    if unneeded:
        return replace(
            verdict, message=f"no case that was tried needs its waiver: {unneeded.reason}"
        )
    return replace(verdict, message=f"no case matches its waiver: {waivers[0].where}")


def _waived(
    verdict: Verdict, waived: dict[Waiver, tuple[Property, Failure]], target: str
) -> Verdict:
    waiver, (prop, (session, violation)) = next(iter(waived.items()))
    return replace(
        verdict,
        status="waived",
        level=prop.level,
        case=repr(session.case),
        violated=prop.name,
        message=f"{violation.message} [waived: {waiver.reason}]",
        script=script(session, verdict.clause, violation, target=target),
    )


def _unneeded(
    waivers: Sequence[Waiver], waived: Collection[Waiver], results: Sequence[PropertyResult]
) -> Waiver | None:
    """Return a waiver of cases that were tried, none of which failed."""
    if any(not waiver.partial for waiver in waived):
        return None
    return next(
        (waiver for waiver in waivers if waiver not in waived and _matches(waiver, results)), None
    )


def _matches(waiver: Waiver, results: Sequence[PropertyResult]) -> bool:
    """Return whether a waiver is about any case that was tried, of the properties that were run to
    the end.
    """
    return any(
        waiver.holds(case) for result in results if not result.fully_waived for case in result.cases
    )


def _with_expired(verdict: Verdict, waivers: Sequence[Waiver]) -> Verdict:
    """Report a waiver that has expired: it is stale where nothing fails, and otherwise waives
    nothing.
    """
    expired = next((waiver for waiver in waivers if waiver.expired), None)
    if expired is None:
        return verdict
    since = f"expired on {expired.expires}: {expired.reason}"
    if verdict.status in ("fail", "refused", "harness_error"):
        return replace(verdict, message=f"{verdict.message} [its waiver {since}]")
    return replace(
        verdict, status="stale_waiver", required=True, message=f"delete its waiver, which {since}"
    )


def _rejections(results: Sequence[PropertyResult]) -> dict[str, Rejections]:
    """Return how often the cases of all properties rejected each known-bad answer."""
    total: dict[str, Rejections] = {}
    for name, count in (each for result in results for each in result.rejections.items()):
        total[name] = total.get(name, Rejections(0, 0)) + count
    return dict(sorted(total.items()))


def _reasons(results: Sequence[PropertyResult]) -> str:
    """Return why properties were not judged, or not on all cases, each reason once."""
    reasons = [result.note if result.cases else result.discard_reason for result in results]
    texts = [
        str(result.not_applicable or reason)
        for result, reason in zip(results, reasons, strict=True)
    ]
    return "; ".join(dict.fromkeys(filter(None, texts)))


def _topic(results: Sequence[PropertyResult]) -> str:
    """Return what reports count the first reason under."""
    return next((result.not_applicable.topic for result in results if result.not_applicable), "")
