"""Verdicts as plain text, for every front end."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Collection, Iterable

from mha.conformance.reports.summary import outcome, rejections, share, status_of
from mha.conformance.results import NONCONFORMING, Verdict, by_implementation
from mha.spec import CLAUSES

# Of a message, a name and a script, in characters: what is longer stands in the JSON.
LONGEST, LONGEST_NAME, LONGEST_SCRIPT = 4000, 80, 100_000


def visible(text: str, longest: int = LONGEST) -> str:
    """Return a text with nothing in it that a terminal or a page would obey, cut where it is too long."""
    fit = "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text[:longest])
    return fit if len(text) <= longest else f"{fit} ... ({len(text):,} characters)"


def shown(name: str) -> str:
    """Return a name as it can be shown in a line."""
    return visible(name.replace("\n", " "), LONGEST_NAME)


def judged(verdict: Verdict) -> str:
    """Return what was judged: the implementation, in which dtype, on which device."""
    return f"{shown(verdict.implementation)}, {verdict.dtype} on {verdict.device}"


def describe(verdict: Verdict) -> str:
    """Return what a user needs to know of a verdict that is not a pass."""
    clause = CLAUSES[verdict.clause]
    rows = {
        "judged": f"{judged(verdict)}; {verdict.examples} cases tried",
        "case": visible(verdict.case or ""),
        "blocked by": verdict.blocked_by or "",
        "found": visible(verdict.message),
        "elsewhere": clause.differs,
        "source": clause.source,
    }
    lines = [f"{clause.id} ({verdict.level}): {clause.title}", _wrapped(clause.statement, "    "), ""]
    for name, text in rows.items():
        if "\n" in text:  # a traceback of the judge
            lines.append(textwrap.indent(text.strip(), " " * 11).replace(" " * 11, f"{name:<11}", 1))
        elif text:
            lines.append(_wrapped(text, f"{name:<11}", " " * 11) if name != "case" else f"{name:<11}{text}")
    if verdict.script:
        lines += ["", "To see it without the judge, save this as a file and run it:", ""]
        lines.append(textwrap.indent(visible(verdict.script, LONGEST_SCRIPT), "    "))
    return "\n".join(lines)


def summarise(verdicts: Iterable[Verdict], *, incomplete: bool = False) -> list[str]:
    """Return a line for each implementation, and one for each clause that it does not keep, the root causes first.

    incomplete: the run was stopped, and there may be clauses that were not judged.
    """
    lines = []
    for own in by_implementation(verdicts).values():
        counts = Counter(status_of(verdict) for verdict in own)
        told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        examples, margin = sum(v.examples for v in own), max(v.margin for v in own)
        whole = f"INCOMPLETE, so far: {outcome(own)}" if incomplete else outcome(own)
        lines.append(
            f"{shown(own[0].implementation)}: {whole} ({told}; {examples} cases, largest error/bound {margin:.2f})"
        )
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
            lines.append(_wrapped(f"{status} {clause} ({where}): {brief(found[0])}", "    ", " " * 8))
        for cause, stopped in blocked.items():
            listed = ", ".join(dict.fromkeys(verdict.clause for verdict in stopped))
            told = f"blocked by {cause}, so that nothing can be said of {listed}: {brief(stopped[0])}"
            lines.append(_wrapped(told, "    ", " " * 8))
        met, claimed = share(own)
        if not claimed:
            reasons = "; ".join(dict.fromkeys(verdict.message for verdict in own))
            lines.append(_wrapped(visible(reasons), "    ", " " * 8))
            continue
        bitten, tried = rejections(own)
        wrong = f"; of {tried} cases given to known wrong answers {bitten / tried:.0%} reject them" if tried else ""
        lines.append(f"    meets {met} of the {claimed} clauses that it claims{wrong}")
    return lines


def brief(verdict: Verdict) -> str:
    """Return the message in a line."""
    return textwrap.shorten(visible(verdict.message), 200, placeholder=" ...")


def _place(clause: str, blocked: Collection[str]) -> tuple[bool, int]:
    """Where a clause is told: what blocks others comes first, then the order of the contract."""
    return clause not in blocked and CLAUSES[clause].family not in blocked, list(CLAUSES).index(clause)


def _wrapped(text: str, first: str, rest: str | None = None) -> str:
    indent = first if rest is None else rest
    return textwrap.fill(text, 110, initial_indent=first, subsequent_indent=indent, break_long_words=False)
