"""Verdicts as plain text, for every front end."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Collection, Iterable

from mha.conformance.report import NONCONFORMING, Verdict
from mha.spec import CLAUSES


def describe(verdict: Verdict) -> str:
    """Return what a user needs to know of a verdict that is not a pass."""
    clause = CLAUSES[verdict.clause]
    rows = {
        "judged": f"{verdict.implementation}, {verdict.dtype} on {verdict.device}; {verdict.examples} cases tried",
        "case": verdict.case or "",
        "blocked by": verdict.blocked_by or "",
        "found": verdict.message,
        "elsewhere": clause.differs,
        "source": clause.source,
    }
    lines = [f"{clause.id} ({verdict.level}): {clause.title}", _wrapped(clause.statement, "    "), ""]
    for name, text in rows.items():
        if text:
            lines.append(_wrapped(text, f"{name:<11}", " " * 11) if name != "case" else f"{name:<11}{text}")
    if verdict.script:
        lines += ["", "To see it without the judge, save this as a file and run it:", ""]
        lines.append(textwrap.indent(verdict.script, "    "))
    return "\n".join(lines)


def summarise(verdicts: Iterable[Verdict], *, incomplete: bool = False) -> list[str]:
    """Return a line for each implementation, and one for each clause that it does not keep, the root causes first.

    incomplete: the run was stopped, and there may be clauses that were not judged.
    """
    lines = []
    by_name: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_name.setdefault(verdict.implementation, []).append(verdict)
    for name, own in by_name.items():
        counts = Counter(status_of(verdict) for verdict in own)
        told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        examples, margin = sum(v.examples for v in own), max(v.margin for v in own)
        outcome = f"INCOMPLETE, so far: {_outcome(own)}" if incomplete else _outcome(own)
        lines.append(f"{name}: {outcome} ({told}; {examples} cases, largest error/bound {margin:.2f})")
        told_of: dict[tuple[str, str], list[Verdict]] = {}
        blocked: dict[str, list[Verdict]] = {}
        for verdict in own:
            if verdict.blocked_by:
                blocked.setdefault(verdict.blocked_by, []).append(verdict)
            elif verdict.status in (*NONCONFORMING, "waived", "harness_error"):
                told_of.setdefault((verdict.clause, status_of(verdict)), []).append(verdict)
        for clause, status in sorted(told_of, key=lambda key: _place(key[0], blocked)):
            found = told_of[clause, status]
            where = ", ".join(f"{verdict.dtype} {verdict.device}" for verdict in found)
            message = textwrap.shorten(found[0].message, 200, placeholder=" ...")
            lines.append(_wrapped(f"{status} {clause} ({where}): {message}", "    ", " " * 8))
        for cause, stopped in blocked.items():
            listed = ", ".join(dict.fromkeys(verdict.clause for verdict in stopped))
            message = textwrap.shorten(stopped[0].message, 200, placeholder=" ...")
            told = f"blocked by {cause}, so that nothing can be said of {listed}: {message}"
            lines.append(_wrapped(told, "    ", " " * 8))
        tried = sum(count for v in own for name, count in v.rejected.items() if name.endswith(" tried"))
        if tried:
            bitten = sum(sum(v.rejected.values()) for v in own) - tried
            lines.append(f"    known wrong answers, given to {tried} of these cases: {bitten / tried:.0%} rejected")
    return lines


def status_of(verdict: Verdict) -> str:
    """Return the status in words; what does not stop conformance is told apart."""
    spared = not verdict.required and verdict.status in NONCONFORMING
    return "SHOULD not kept" if spared else verdict.status.replace("_", " ")


def _outcome(own: list[Verdict]) -> str:
    statuses = {verdict.status for verdict in own}
    if "harness_error" in statuses:
        return "CANNOT BE JUDGED"
    if statuses == {"not_claimed"}:
        return "NOTHING WAS JUDGED"
    if not all(verdict.conforms for verdict in own):
        return "DOES NOT CONFORM"
    return "conforms but for what is waived" if "waived" in statuses else "conforms"


def _place(clause: str, blocked: Collection[str]) -> tuple[bool, int]:
    """Where a clause is told: what blocks others comes first, then the order of the contract."""
    return clause not in blocked and CLAUSES[clause].family not in blocked, list(CLAUSES).index(clause)


def _wrapped(text: str, first: str, rest: str | None = None) -> str:
    indent = first if rest is None else rest
    return textwrap.fill(text, 110, initial_indent=first, subsequent_indent=indent, break_long_words=False)
