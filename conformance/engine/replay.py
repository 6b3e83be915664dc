"""`mha replay`: failures that were found, run again as they are, without Hypothesis."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple, get_args

from mha.conformance.cases.case import SHARING, Case
from mha.conformance.cases.layouts import LAYOUTS
from mha.conformance.cases.masks import EXTENTS
from mha.conformance.cases.values import VALUES
from mha.conformance.engine.search import MAY_REFUSE, may_refuse
from mha.conformance.harness.errors import Discard, Violation
from mha.conformance.harness.isolation import threads
from mha.conformance.harness.recording import MODES
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import Property, properties
from mha.conformance.reports.files import read
from mha.conformance.reports.text import judged, shown, visible
from mha.conformance.results import NONCONFORMING, Report, Verdict
from mha.conformance.settings import validate_choice, validate_devices
from mha.implementations import resolve
from mha.spec import Implementation
from mha.spec.claims import DTYPES, Alignment

# The words that a field of a case may have.
WORDS: dict[str, Collection[str]] = {
    "dtype": DTYPES,
    "mask": ("none", *EXTENTS),
    "inputs": SHARING,
    "layout": (*LAYOUTS, "mixed"),
    "values": VALUES,
    "mode": MODES,
    "alignment": get_args(Alignment),
}


class Replay(NamedTuple):
    """What became of a failure: "FAILS", "FIXED" or, where the case says nothing any more, "SILENT", and why."""

    verdict: Verdict
    outcome: str
    message: str


def failures(report: Report, clauses: tuple[str, ...] = ()) -> list[Verdict]:
    """Return what failed, or was waived, and has a case, of these clauses, of all if none."""
    return [
        verdict
        for verdict in report.verdicts
        if verdict.status in (*NONCONFORMING, "waived") and verdict.case and (not clauses or verdict.clause in clauses)
    ]


def replay(report: Report, chosen: list[Verdict], target: str = "") -> Iterator[Replay]:
    """Run failures again, with the implementation that the report names, or another one.

    Raises ValueError where the report does not say how an implementation was named, or a case cannot be read.
    """
    known: dict[str, Implementation] = {}
    for verdict in chosen:
        named = target or report.targets.get(verdict.implementation, "")
        if not named:
            raise ValueError(f"the report does not say where {verdict.implementation!r} is; name it with --impl")
        if named not in known:
            known[named] = one_of(named)
        validate_devices([verdict.device])
        case = replace(read_case(verdict.case or ""), dtype=verdict.dtype, device=verdict.device)
        yield Replay(verdict, *replayed(known[named], verdict.clause, verdict.violated, case))


def one_of(target: str) -> Implementation:
    """Return the implementation that a target names; raises ValueError if there are several."""
    found = resolve(target)
    if len(found) != 1:
        raise ValueError(f"{target!r} names {len(found)} implementations; name one")
    return found[0].implementation


def replayed(implementation: Implementation, clause: str, violated: str, case: Case) -> tuple[str, str]:
    """Try one case against the property of a clause that it violated, all of the clause if that is not known."""
    members = [prop for prop in properties().get(clause, ()) if violated in ("", prop.name)]
    if not members:
        raise ValueError(f"there is no property {violated!r} of the clause {clause!r} in this version")
    silent, claimed = "", [p for p in members if not isinstance(p.within(implementation.claims, case.dtype), str)]
    for prop in claimed or members:
        outcome, message = _tried(implementation, prop, case)
        if outcome == "FAILS":
            return outcome, message
        silent = silent if outcome == "FIXED" else message
    return ("SILENT", silent) if silent else ("FIXED", "")


def _tried(implementation: Implementation, prop: Property, case: Case) -> tuple[str, str]:
    domain = prop.within(implementation.claims, case.dtype)
    if isinstance(domain, str):
        return "SILENT", domain
    try:
        with threads(1):
            prop.check(Session(implementation, case), case)
    except Discard as reason:
        return "SILENT", str(reason)
    except Violation as violation:
        if may_refuse(prop.clause, case, violation):
            return "SILENT", MAY_REFUSE
        return "FAILS", violation.message
    except Exception as error:  # of the property, which is not made for every case that a user may write
        return "SILENT", f"{prop.name} does not take this case ({type(error).__name__})"
    return "FIXED", ""


def read_case(text: str) -> Case:
    """Read a case as its repr writes it; raises ValueError, in a line, for anything else."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Case"):
            raise ValueError("it is no call of Case")
        given = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        why = error.args[0] if error.args else "it is too long"
        raise ValueError(f"{text[:80]!r} is no case, as Case(L=2, mask='padding'): {why}") from None
    known = {field.name: field.default for field in fields(Case)}
    if call.args or not set(given) <= set(known):
        raise ValueError(f"a case has only {', '.join(sorted(known))}, each by name, but this is {text[:80]!r}")
    for name, value in given.items():
        if type(value) is not type(known[name]) or (type(value) is int and value < 0):
            raise ValueError(f"{name} of a case must be as {known[name]!r}, but is {value!r:.80}")
        if name in WORDS:
            validate_choice(f"{name} of a case", [str(value)], WORDS[name])
    validate_devices([str(given.get("device", "cpu"))])
    return Case(**given)


def replay_what(what: str, clauses: list[str], target: str) -> Iterator[tuple[str, str]]:
    """Run a case, or the failures of a report, again; yield the outcome of each, and a line that tells it.

    what: the case as it is written, or the file's name. Raises ValueError for what cannot be replayed.
    """
    if what.lstrip().startswith("Case("):
        if len(clauses) != 1 or not target:
            raise ValueError("a case alone does not say what it violates: give --clause and --impl")
        implementation = one_of(target)
        outcome, message = replayed(implementation, clauses[0], "", read_case(what))
        yield outcome, f"{outcome:7} {clauses[0]:7} {shown(implementation.name)}: {message or what}"
        return
    report = read(Path(what))
    chosen = failures(report, tuple(clauses))
    if not chosen:
        raise ValueError(f"nothing to replay: nothing fails{' ' + ', '.join(clauses) if clauses else ''} in {what!r}")
    for verdict, outcome, message in replay(report, chosen, target):
        yield outcome, f"{outcome:7} {verdict.clause:7} {judged(verdict)}: {visible(message or verdict.case or '')}"
