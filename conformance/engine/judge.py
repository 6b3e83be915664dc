"""The judge: a verdict on each clause."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from time import perf_counter

import torch

from mha.conformance.cases.reasons import OTHER_DTYPES, NotApplicable
from mha.conformance.diagnosis.arguments import arguments_of
from mha.conformance.diagnosis.diagnose import diagnose
from mha.conformance.diagnosis.steps import first_wrong_step
from mha.conformance.engine.property_run import run_property
from mha.conformance.engine.report import not_covered, report_of_run
from mha.conformance.engine.search import Failure, PropertyResult
from mha.conformance.engine.verdicts import verdict_of, with_expired
from mha.conformance.harness.errors import CallRaised, GpuLost
from mha.conformance.harness.integrity import look_again
from mha.conformance.harness.isolation import contained, gpu_is_lost, heeding_interrupts
from mha.conformance.harness.known_bad.advice import fix_of
from mha.conformance.properties.registry import Property, needs_ranks, properties
from mha.conformance.results import Report, Status, Verdict, now
from mha.conformance.settings import Settings, Task
from mha.conformance.sharding.gathered import runs_on_ranks_only
from mha.conformance.waivers import Waiver, waivers_for
from mha.implementations import Resolved, preflight
from mha.implementations.discovery.resolve import as_resolved
from mha.implementations.process.pristine import torch_changes
from mha.spec import CLAUSES, Implementation

GPU_IS_LOST = (
    "not judged: this process can no longer use its GPU after an earlier call; mha check"
    " replaces it"
)


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
    """Judge an implementation without pytest, as `mha check` and `pytest conformance` do.

    implementation: what `mha check` takes: an implementation, a plain module class, a function that
        makes a module or computes attention, or the name or place of one of these.
    clauses: ids or families; all that are claimed if empty.
    require: ids or families of clauses that count as a MUST.
    profile, seed, dtypes, devices, waivers, strict: see `mha.conformance.settings.Settings`.

    What is not given is as `[tool.mha]` says in the pyproject.toml of the current folder, or of the
    next one above it.

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
    """Return what a value stands for, and warn of a class that is read as what it is nearest to.

    Raises as `check` does.
    """
    resolved = as_resolved(value)
    preflight(resolved.implementation)
    inference = resolved.inference
    if inference is None or isinstance(value, Resolved):  # whose reading the caller has
        return resolved
    if any(row.evidence.startswith("assumed") for row in inference.rows):
        name = resolved.implementation.name
        reading = f"{name} is read as what it is nearest to:\n{inference.report()}"
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
    (see `results.settled`).

    diagnosed: whether to look for the defect behind a failure, which takes a while.
    """
    start, task = perf_counter(), Task(clause, dtype, device)
    verdict = _passed(resolved.implementation.name, task, settings)
    waivers = _waivers_of(resolved.implementation, task, settings)
    if unclaimed := _unclaimed(resolved.implementation, task):
        verdict = replace(
            verdict, status="not_claimed", message=str(unclaimed), topic=unclaimed.topic
        )
    elif gpu_is_lost():  # then no call can be waited for, not even on the CPU
        verdict = replace(verdict, status="harness_error", message=GPU_IS_LOST)
    else:
        valid = [waiver for waiver in waivers if not waiver.expired]
        with heeding_interrupts():
            verdict = _judged(verdict, resolved, settings, valid, diagnosed=diagnosed)
    verdict = with_expired(verdict, waivers)
    return replace(verdict, seconds=round(perf_counter() - start, 3))


def seen_at_once(
    name: str, task: Task, settings: Settings, prop: Property, failure: Failure
) -> Verdict:
    """Return what a failing case says before it is made simpler and explained.

    The verdict may be another: another clause may explain the failure.

    name: of the implementation.
    prop, failure: as `told_at_once` gives them.
    """
    session, violation = failure
    return replace(
        _passed(name, task, settings),
        status="fail",
        level=prop.level,
        required=settings.requires(task.clause, prop.level),
        message=violation.message,
        case=repr(session.case),
    )


def _judged(
    verdict: Verdict,
    resolved: Resolved,
    settings: Settings,
    waivers: Sequence[Waiver],
    *,
    diagnosed: bool,
) -> Verdict:
    """Return the verdict once the properties of its clause are run; waivers: none is expired."""
    task = Task(verdict.clause, verdict.dtype, verdict.device)
    try:
        results = _results(resolved.implementation, task, settings, waivers)
    except GpuLost as lost:
        return _lost(verdict, lost, waivers)
    verdict = verdict_of(
        verdict,
        results,
        waivers,
        requires=settings.requires,
        few=settings.limits.is_partial,
        target=resolved.target,
    )
    if diagnosed and verdict.status == "fail" and not verdict.blocked_by:
        return _explained(verdict, results[-1])
    return verdict


def stopped(
    resolved: Resolved, task: Task, settings: Settings, reason: str, *, status: Status = "fail"
) -> Verdict:
    """Return the verdict where judging did not end: the process crashed, or ran out of time."""
    waivers = _waivers_of(resolved.implementation, task, settings)
    covering = [waiver for waiver in waivers if not (waiver.expired or waiver.partial)]
    message = f"judging did not end: {reason}"
    if covering and status == "fail":
        status, message = "waived", f"{message} [waived: {covering[0].reason}]"
    verdict = _passed(resolved.implementation.name, task, settings)
    verdict = replace(verdict, status=status, message=message)
    return with_expired(verdict, waivers)


def not_judged(resolved: Resolved, task: Task, settings: Settings, reason: str) -> Verdict:
    """Return the verdict on a clause that was due, and was not judged."""
    verdict = _passed(resolved.implementation.name, task, settings)
    return replace(verdict, status="harness_error", message=f"not judged: {reason}")


def _lost(verdict: Verdict, lost: GpuLost, waivers: Collection[Waiver]) -> Verdict:
    """Return the verdict where a call ended the use of the GPU, so that nothing there is shown."""
    message = f"{lost.message}, and its process can no longer use the GPU"
    if lost.case is None:
        return replace(verdict, status="fail", message=message)
    verdict = replace(verdict, case=repr(lost.case))
    for waiver in waivers:
        if waiver.covers(lost.case, message):
            message = f"{message} [waived: {waiver.reason}]"
            return replace(verdict, status="waived", message=message)
    return replace(verdict, status="fail", message=message)


def _waivers_of(implementation: Implementation, task: Task, settings: Settings) -> list[Waiver]:
    return waivers_for(settings.waivers_of(implementation), implementation.name, *task)


def _passed(name: str, task: Task, settings: Settings) -> Verdict:
    """Return the verdict before anything is run; name: of the implementation."""
    level = CLAUSES[task.clause].level
    required = settings.requires(task.clause, level)
    return Verdict(
        implementation=name, level=level, required=required, status="pass", **task._asdict()
    )


def _results(
    implementation: Implementation,
    task: Task,
    settings: Settings,
    waivers: Collection[Waiver],
) -> list[PropertyResult]:
    """Run the properties of a clause, those of a SHOULD last, up to one that decides it."""
    results: list[PropertyResult] = []
    for prop in sorted(properties()[task.clause], key=lambda prop: prop.level == "SHOULD"):
        results.append(
            run_property(implementation, prop, task.dtype, task.device, settings, waivers)
        )
        if results[-1].ends:
            break
    return results


def _explained(verdict: Verdict, result: PropertyResult) -> Verdict:
    """Return a failure with its last call, and the defect behind it, or its first wrong step."""
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


def _unclaimed(implementation: Implementation, task: Task) -> NotApplicable | None:
    """Return why nothing of a clause is claimed here, whatever its properties need, if so."""
    claims = implementation.claims
    if runs_on_ranks_only(implementation) and not needs_ranks(task.clause):
        return NotApplicable("it runs on ranks only; pass unsharded= for what it is without them")
    if task.dtype in claims.dtypes and task.device in claims.devices:
        return None
    given = f"{task.dtype} on {task.device}"
    claimed = f"{', '.join(sorted(claims.dtypes))} on {', '.join(sorted(claims.devices))}"
    return NotApplicable(f"{given} is not claimed; claimed: {claimed}", OTHER_DTYPES)
