"""Verdicts as plain text, for every front end."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable

from mha.conformance.report import NONCONFORMING, Verdict
from mha.spec import CLAUSES


def describe(verdict: Verdict) -> str:
    """Return what a user needs to know of a verdict that is not a pass."""
    clause = CLAUSES[verdict.clause]
    rows = {
        "judged": f"{verdict.implementation}, {verdict.dtype} on {verdict.device}; {verdict.examples} cases tried",
        "case": verdict.case or "",
        "found": verdict.message,
        "elsewhere": clause.differs,
        "source": clause.source,
    }
    lines = [f"{clause.id} ({clause.level}): {clause.title}", _wrapped(clause.statement, "    "), ""]
    for name, text in rows.items():
        if text:
            lines.append(_wrapped(text, f"{name:<11}", " " * 11) if name != "case" else f"{name:<11}{text}")
    if verdict.script:
        lines += ["", "To see it without the judge, save this as a file and run it:", ""]
        lines.append(textwrap.indent(verdict.script, "    "))
    return "\n".join(lines)


def summarise(verdicts: Iterable[Verdict]) -> list[str]:
    """Return a line for each implementation, and one for each clause that it does not keep."""
    lines = []
    by_name: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_name.setdefault(verdict.implementation, []).append(verdict)
    for name, own in by_name.items():
        counts = Counter(verdict.status for verdict in own)
        told = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in sorted(counts.items()))
        outcome = "conforms" if all(v.conforms for v in own) else "DOES NOT CONFORM"
        if counts["waived"] and outcome == "conforms":
            outcome = "conforms but for what is waived"
        if counts["not_claimed"] == len(own):
            outcome = "NOTHING WAS JUDGED"
        if counts["harness_error"]:
            outcome = "CANNOT BE JUDGED"
        examples, margin = sum(v.examples for v in own), max(v.margin for v in own)
        lines.append(f"{name}: {outcome} ({told}; {examples} cases, largest error/bound {margin:.2f})")
        told_of: dict[tuple[str, str], list[Verdict]] = {}
        for verdict in own:
            if verdict.status in (*NONCONFORMING, "waived", "harness_error"):
                told_of.setdefault((verdict.clause, verdict.status), []).append(verdict)
        for clause, status in sorted(told_of, key=lambda key: list(CLAUSES).index(key[0])):
            found = told_of[clause, status]
            where = ", ".join(f"{verdict.dtype} {verdict.device}" for verdict in found)
            message = textwrap.shorten(found[0].message, 200, placeholder=" ...")
            lines.append(_wrapped(f"{status} {clause} ({where}): {message}", "    ", " " * 8))
    return lines


def _wrapped(text: str, first: str, rest: str | None = None) -> str:
    indent = first if rest is None else rest
    return textwrap.fill(text, 110, initial_indent=first, subsequent_indent=indent, break_long_words=False)
