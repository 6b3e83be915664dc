"""The judge: a verdict on each clause."""

from __future__ import annotations

import platform
import traceback
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import product
from time import perf_counter
from typing import Any

from mha.conformance.engine.preconditions import Fault, plain_fault
from mha.conformance.engine.reproduction import script
from mha.conformance.engine.search import PROFILES, Search
from mha.conformance.harness.errors import CallRaised, Violation
from mha.conformance.harness.isolation import heeding_interrupts, threads
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import Property, properties
from mha.conformance.results import Report, Verdict, host, now
from mha.conformance.settings import validate_choice, validate_devices
from mha.conformance.waivers import Waiver, waivers_for
from mha.implementations import preflight
from mha.spec import CLAUSES, Implementation
from mha.spec.claims import DTYPES

# What a waiver covers: the property that was violated, the trial, and its violation.
Seen = tuple[Property, Session, Violation]


def check(
    implementation: Implementation,
    profile: str = "default",
    seed: int = 0,
    *,
    clauses: Collection[str] | None = None,
    dtypes: Collection[str] = ("float32", "float64"),
    devices: Collection[str] = ("cpu",),
    waivers: Collection[Waiver] = (),
    strict: bool = False,
) -> Report:
    """Hold an implementation to the contract, without pytest.

    profile: "quick", "default" or "thorough". seed: of the cases; one seed gives the same cases and verdicts.
    clauses: ids; all that have a property unless given. dtypes, devices: names as in torch.
    waivers: known departures, none by default; one that no longer departs is a `stale_waiver`.
    strict: hold it to the clauses of level SHOULD too.
    Raises ValueError for a word that is not known, for a device that is not there, and for an
    adapter that does not fit what it adapts.
    """
    validate_choice("profile", [profile], PROFILES)
    validate_choice("clause", clauses or (), properties())
    validate_choice("dtype", dtypes, DTYPES)
    validate_devices(devices)
    preflight(implementation)
    started = now()
    found = judged(
        implementation,
        [clause for clause in properties() if clauses is None or clause in clauses],
        dtypes,
        devices,
        profile=profile,
        seed=seed,
        waivers=waivers,
        strict=strict,
    )
    return Report(
        verdicts=tuple(found),
        profile=profile,
        seed=seed,
        versions=versions(),
        started=started,
        host=host(),
    )


def judged(
    implementation: Implementation,
    clauses: Collection[str],
    dtypes: Collection[str],
    devices: Collection[str],
    **options: Any,
) -> Iterator[Verdict]:
    """Yield the verdicts one after another; options: of `judge`."""
    for device, dtype, clause in product(devices, dtypes, clauses):
        yield judge(implementation, clause, dtype=dtype, device=device, **options)


def judge(
    implementation: Implementation,
    clause: str,
    *,
    dtype: str,
    device: str,
    profile: str = "default",
    seed: int = 0,
    waivers: Collection[Waiver] = (),
    strict: bool = False,
    target: str = "",
) -> Verdict:
    """Return the verdict on one clause; whatever goes wrong in the judge itself is a harness error.

    target: how the implementation was named, for the script that shows a failure; see `mha.implementations.resolve`.
    """
    start = perf_counter()
    known = waivers_for(waivers, implementation.name, clause, dtype, device)
    with heeding_interrupts():
        found = _judge(
            implementation, clause, dtype, device, profile, seed, [w for w in known if not w.expired], strict, target
        )
    expired = next((waiver for waiver in known if waiver.expired), None)
    if expired and found.status not in ("fail", "refused", "blocked", "harness_error"):
        told = f"delete its waiver, which expired on {expired.expires}: {expired.reason}"
        found = replace(found, status="stale_waiver", required=True, message=told)
    elif expired:
        told = f"{found.message} [its waiver expired on {expired.expires}: {expired.reason}]"
        found = replace(found, message=told)
    return replace(found, seconds=round(perf_counter() - start, 3))


def _judge(
    implementation: Implementation,
    clause: str,
    dtype: str,
    device: str,
    profile: str,
    seed: int,
    waivers: Collection[Waiver],
    strict: bool,
    target: str,
) -> Verdict:
    found = Verdict(
        implementation=implementation.name,
        clause=clause,
        level=CLAUSES[clause].level,
        required=strict or CLAUSES[clause].level != "SHOULD",
        dtype=dtype,
        device=device,
        status="pass",
    )
    claims = implementation.claims
    if dtype not in claims.dtypes or device not in claims.devices:
        told = f"claimed: {', '.join(sorted(claims.dtypes))} on {', '.join(sorted(claims.devices))}"
        return replace(found, status="not_claimed", message=f"{dtype} on {device} is not claimed; {told}")
    reasons, rejected, waived, met = [], Counter[str](), dict[Waiver, Seen](), set[Waiver]()
    for prop in sorted(properties()[clause], key=lambda prop: prop.level == "SHOULD"):
        try:
            domain = prop.within(claims, dtype)
            if isinstance(domain, str):
                reasons.append(domain)
                continue
            with threads(1):
                search = Search(implementation, prop, domain, dtype, device, PROFILES[profile], seed, waivers)
                fault = partial(_root, implementation, prop, dtype, device)
                search.run(lambda fault=fault: fault() is None)  # type: ignore[misc]  # loop
                found = replace(
                    found,
                    examples=found.examples + search.examples,
                    first=found.examples + search.first if search.failure else None,
                    margin=max(found.margin, search.margin),
                )
                if search.failure:
                    if root := fault():
                        return replace(found, status="blocked", blocked_by=root.clause, message=root.message)
                    return _departure(found, prop, search, waivers, strict, target)
                waived = {waiver: (prop, *seen) for waiver, seen in search.waived.items()} | waived
                if search.settled:
                    break
                met |= {waiver for waiver in waivers if any(waiver.holds(case) for case in search.tried)}
                rejected += search.sensitivity.rejected
                if search.sensitivity.found:
                    return replace(found, status="harness_error", message=f"{prop.name}: {search.sensitivity.found}")
                reasons += [search.left_out] if not search.examples else []
        except Exception as error:
            told = f"{prop.name}: {error!r}\n{traceback.format_exc()}"
            return replace(found, status="harness_error", message=told)
    found, why = replace(found, rejected=dict(sorted(rejected.items()))), "; ".join(dict.fromkeys(reasons))
    whole = next((waiver for waiver in waived if not waiver.partial), None)
    stale = next((waiver for waiver in waivers if waiver in met - set(waived) and not whole), None)
    if stale:
        told = f"nothing departs from this clause{' as the waiver says' if stale.partial else ''}"
        return replace(
            found, status="stale_waiver", required=True, message=f"{told}; delete its waiver: {stale.reason}"
        )
    if waivers and not found.examples:
        told = f"nothing is judged: {why}; delete its waiver: {next(iter(waivers)).reason}"
        return replace(found, status="stale_waiver", required=True, message=told)
    for waiver, (prop, trial, violation) in waived.items():
        found = replace(found, level=prop.level, case=repr(trial.case), violated=prop.name)
        message, code = (
            f"{violation.message} [waived: {waiver.reason}]",
            script(trial, clause, violation, target=target),
        )
        return replace(found, status="waived", message=message, script=code)
    if waivers:
        return replace(found, message=f"no case of its waiver came up: {next(iter(waivers)).where}")
    return replace(found, status="pass" if found.examples else "not_claimed", message=why)


def _root(implementation: Implementation, prop: Property, dtype: str, device: str) -> Fault | None:
    """Return the basic clause whose failure leaves nothing to say of a property, if there is one."""
    fault = plain_fault(implementation, dtype, device) if prop.requires else None
    return fault if fault and (fault.clause == "SHP-1" or fault.clause == prop.requires) else None


def _departure(
    found: Verdict, prop: Property, search: Search, waivers: Collection[Waiver], strict: bool, target: str
) -> Verdict:
    """Return the verdict on a property that was violated."""
    assert search.failure is not None
    trial, violation = search.failure
    required, case = strict or prop.level != "SHOULD", repr(trial.case)
    found = replace(found, level=prop.level, required=required, case=case, violated=prop.name)
    message, code = f"{violation.message}{search.remark}", script(trial, prop.clause, violation, target=target)
    if waivers:
        message += f" [its waiver does not cover this case: {next(iter(waivers)).reason}]"
    # What only this property builds, no property of the other family has seen.
    alone = (prop.needs or "").partition(":")[0] in ("extras", "grouped_query", "kv_widths", "decodes", "composes")
    if violation.family and violation.family != CLAUSES[prop.clause].family and not alone:
        return replace(found, status="blocked", blocked_by=violation.family, message=message, script=code)
    refused = isinstance(violation, CallRaised) and isinstance(violation.error, NotImplementedError)
    return replace(found, status="refused" if refused else "fail", message=message, script=code)


def versions() -> dict[str, str]:
    """Return the versions that a verdict may depend on."""
    packages = {name: version(name) for name in ("mha-conformance", "torch", "hypothesis")}
    return packages | {"python": platform.python_version()}
