"""Verdicts as plain text, for every front end."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import IO

from mha.conformance.harness.known_bad.sources import seen_in
from mha.conformance.reports.summary import (
    Tally,
    cause_of,
    findings,
    outcome,
    severity,
    tally,
    total_rejections,
)
from mha.conformance.results import NONCONFORMING, Report, Verdict, by_implementation, status_of
from mha.spec.clauses import CLAUSES

# In characters; the JSON has the whole of a longer text.
LONGEST_TEXT, LONGEST_NAME, LONGEST_SCRIPT, LONGEST_BRIEF = 4000, 80, 100_000, 200
# In columns: of a line, unless the terminal is narrower, and of the labels of a description.
WIDTH, LABEL_WIDTH = 110, 11
INDENT = " " * 4
# How a level reads beside a failure.
LEVELS = {"MAY": "MAY, and claimed"}
# Why a family blocks clauses of others.
FAMILY_FAILS = "which the same calls fail"
LISTED = (*NONCONFORMING, "waived", "harness_error")


def visible(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return a text with every character escaped that a terminal or a browser would act on, cut where it is too long.

    >>> visible("\\x1b[2Jcleared")
    '\\\\x1b[2Jcleared'
    """
    escaped = "".join(
        c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text[:longest]
    )
    return escaped if len(text) <= longest else f"{escaped} ... ({len(text):,} characters)"


def visible_name(name: str) -> str:
    """Return a name as it can be shown within a line."""
    return visible(name.replace("\n", " "), LONGEST_NAME)


def describe_changes(torch_changes: Collection[str]) -> str:
    """Return in a line what had been changed in torch before a run, empty if nothing had; see `Report`."""
    if not torch_changes:
        return ""
    changes = visible(", ".join(torch_changes).replace("\n", " "))
    return f"torch had been changed before the run: {changes}; the judge computes without that"


def seeds_of(report: Report) -> str:
    """Return the seed of a report, or how many it has.

    >>> seeds_of(Report(verdicts=(), profile="quick", seed=0, seeds=(0, 1, 7), versions={}))
    '3 seeds from 0 to 7'
    """
    if not report.seeds:
        return f"seed {report.seed}"
    return f"{len(report.seeds)} seeds from {report.seeds[0]} to {report.seeds[-1]}"


def subject(verdict: Verdict) -> str:
    """Return what a verdict is about: the implementation, the dtype and the device."""
    return f"{visible_name(verdict.implementation)}, {verdict.dtype} on {verdict.device}"


def brief(verdict: Verdict) -> str:
    """Return the diagnosis, if there is one, and the message in one short line."""
    message = brief_message(verdict)
    return f"{visible(verdict.diagnosis, LONGEST_BRIEF)}: {message}" if verdict.diagnosis else message


def brief_message(verdict: Verdict) -> str:
    """Return the message in one short line."""
    return textwrap.shorten(visible(verdict.message), LONGEST_BRIEF, placeholder=" ...")


def describe(verdict: Verdict, width: int = WIDTH) -> str:
    """Return everything that a user needs to know about a verdict that is not a pass; width: in columns."""
    clause, blocked = CLAUSES[verdict.clause], verdict.status == "blocked"
    lines = [wrapped(f"{clause.id} ({LEVELS.get(verdict.level, verdict.level)}): {clause.title}", width, ""), ""]
    lines += [_row(label, text, width) for label, text in _finding(verdict).items() if text]
    if verdict.case:
        case = visible(verdict.case).replace("\n", " ")  # not wrapped, so that it can be copied
        lines.append(f"{'case':<{LABEL_WIDTH}}{case}")
    tried = f"{verdict.examples} case{'s' * (verdict.examples != 1)} tried"
    rows = {
        "sizes": _sizes(verdict.case or ""),
        "last call": visible(verdict.arguments),
        "blocked by": f"{verdict.blocked_by}, which fails too: start there" if blocked else "",
        "judged": f"{subject(verdict)}; {tried}",
        "clause": clause.statement,
        "why": clause.why,
        "libraries": clause.differs,
        "source": clause.source,
    }
    lines += [_row(label, text, width) for label, text in rows.items() if text]
    if verdict.script and not blocked:
        hint = "To reproduce it without the judge, save this script, which has the names above, and run it:"
        lines += ["", wrapped(hint, width, ""), ""]
        lines.append(textwrap.indent(visible(verdict.script, LONGEST_SCRIPT), "    "))
    return "\n".join(lines)


def _finding(verdict: Verdict) -> dict[str, str]:
    """Return what is wrong and how that is usually mended, by label; a diagnosis says more than such a fix."""
    clause = CLAUSES[verdict.clause]
    first = "First mend the clauses that fail beside this one. Otherwise: " if clause.general else ""
    shown = verdict.status in ("fail", "waived") and not (clause.general and verdict.diagnosis)
    return {
        "diagnosis": f"{visible(verdict.diagnosis)}; this gives the same output" if verdict.diagnosis else "",
        "seen in": seen_in(verdict.diagnosis),
        "message": visible(verdict.message),
        "steps": visible(verdict.steps),
        "usual fix": f"{first}{clause.fix}" if shown else "",
    }


def _sizes(code: str) -> str:
    """Return the sizes of a case, those at their defaults too, which its repr leaves out; empty without a case."""
    from mha.conformance.cases.parsing import read_case  # with torch, which the names in this module do not need

    try:
        case = read_case(code)
    except ValueError:  # of a report that someone else wrote
        return ""
    return f"B={case.B}, L={case.L}, S={case.S}, d_model={case.config.d_model}, n_heads={case.n_heads}"


def summarise(
    verdicts: Iterable[Verdict], *, incomplete: bool = False, width: int = WIDTH, failures: bool = True
) -> list[str]:
    """Return for each implementation its outcome, a line for each clause that does not pass, and its counts.

    What blocks other clauses comes first, then incorrect answers. incomplete: the run was stopped, so clauses may be
    missing. width: in columns; a longer line continues below, indented. failures: whether to list all that fails, or
    only the causes that several clauses share.
    """
    lines = []
    for own in by_implementation(verdicts).values():
        lines.append(wrapped(_headline(own, incomplete), width, "", 2 * INDENT))
        listed = _failures(own) if failures else _causes(own)
        details = (*listed, *_blocked(own), *_totals(own, width - len(INDENT)))
        lines += [wrapped(line, width, INDENT, 2 * INDENT) for line in details]
    return lines


def _headline(verdicts: Sequence[Verdict], incomplete: bool) -> str:
    whole = f"INCOMPLETE, so far: {outcome(verdicts)}" if incomplete else outcome(verdicts)
    examples, margin, counted = sum(v.examples for v in verdicts), max(v.margin for v in verdicts), tally(verdicts)
    name = visible_name(verdicts[0].implementation)
    if not counted.judged:
        return f"{name}: {whole}"
    judged = f"{counted.judged} of {counted.clauses}" if counted.unjudged else str(counted.judged)
    clauses, cases = "clause" + "s" * (counted.clauses != 1), "case" + "s" * (examples != 1)
    evidence = f"{judged} {clauses} judged on {examples} {cases}; largest error/bound {margin:.2f}"
    if (known_bad := total_rejections(verdicts)).tried:
        share = known_bad.rejected / known_bad.tried
        evidence += f"; self-test: {share:.0%} of {known_bad.tried} known-bad answers rejected"
    return f"{name}: {whole} ({evidence})"


def _failures(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield a line for each cause, and for each other clause that fails or is waived in its own right."""
    blocking = {verdict.blocked_by or "" for verdict in verdicts if verdict.status == "blocked"}
    listed = findings(verdict for verdict in verdicts if verdict.status in LISTED and verdict.status != "blocked")
    for same in sorted(listed, key=lambda same: _rank(same, blocking)):
        where = ", ".join(dict.fromkeys(f"{verdict.dtype} {verdict.device}" for verdict in same))
        cause = visible(cause_of(same))
        yield f"{status_of(same[0])} {cause or same[0].clause} ({where}): {brief_message(same[0])}"


def _causes(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield a line for each cause that several clauses share."""
    for same in findings(verdict for verdict in verdicts if verdict.diagnosis and verdict.status != "blocked"):
        if len({verdict.clause for verdict in same}) > 1:
            yield visible(cause_of(same))


def _blocked(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield a line for each clause or family that blocks others."""
    grouped: dict[str, list[str]] = {}
    for verdict in verdicts:
        if verdict.status == "blocked":
            grouped.setdefault(verdict.blocked_by or "", []).append(verdict.clause)
    for cause, clauses in grouped.items():
        why = f"{CLAUSES[cause].title}, which fails too" if cause in CLAUSES else FAMILY_FAILS
        yield f"blocked by {cause} ({why}): {', '.join(dict.fromkeys(clauses))}"


def _totals(verdicts: Sequence[Verdict], width: int) -> Iterator[str]:
    """Yield what was not judged, in a line of at most `width` columns, and how many clauses of each kind pass."""
    counted = tally(verdicts)
    if not counted.judged:
        yield visible("; ".join(dict.fromkeys(verdict.message for verdict in verdicts)))
        return
    yield from _unjudged(counted, width)
    yield str(counted)


def _unjudged(counted: Tally, width: int) -> Iterator[str]:
    """Yield a line with the reasons for which clauses were not judged, the rest of them together if they do not fit."""
    reasons = [f"{visible_name(reason)} ({number})" for reason, number in counted.unjudged.items()]
    numbers = list(counted.unjudged.values())
    for shown in range(len(reasons), -1, -1):
        others = [f"others ({sum(numbers[shown:])})"] if shown < len(reasons) else []
        line = f"not judged: {', '.join(reasons[:shown] + others)}"
        if reasons and (len(line) <= width or shown == 0):
            yield line
            return


def _rank(same: Sequence[Verdict], blocking: Collection[str]) -> tuple[bool, tuple[int, int, bool, bool, int]]:
    """Return a sort key: what blocks other clauses comes first, then what is most severe."""
    clauses = {verdict.clause for verdict in same}
    blocks = any(name in blocking for clause in clauses for name in (clause, CLAUSES[clause].family))
    return not blocks, severity(same[0])


def _row(label: str, text: str, width: int) -> str:
    if "\n" in text:  # a traceback of the judge keeps its lines
        return f"{label:<{LABEL_WIDTH}}{textwrap.indent(text.strip(), ' ' * LABEL_WIDTH).lstrip()}"
    return wrapped(text, width, f"{label:<{LABEL_WIDTH}}", " " * LABEL_WIDTH)


def width_of(stream: IO[str]) -> int:
    """Return how many columns to use: those of a terminal, and `WIDTH` at most and for a file or pipe."""
    return min(shutil.get_terminal_size().columns, WIDTH) if stream.isatty() else WIDTH


def fitted(text: str, stream: IO[str], indent: str = INDENT) -> str:
    """Return a text whose lines fit a terminal, except code, which is indented.

    It is unchanged for a file or pipe, where one may search for a line.
    """
    if not stream.isatty():
        return text
    width = width_of(stream)
    return "\n".join(line if line.startswith(" ") else wrapped(line, width, "", indent) for line in text.split("\n"))


def wrapped(text: str, width: int, first: str, rest: str | None = None) -> str:
    """Return a text in lines of at most `width` columns.

    Long words and code are never broken. first, rest: what the first line and the others begin with.

    >>> wrapped("one two three", 8, "", "  ")
    'one two\\n  three'
    """
    indent = first if rest is None else rest
    filler = textwrap.TextWrapper(width, first, indent, break_long_words=False, break_on_hyphens=False)
    return filler.fill(text)
