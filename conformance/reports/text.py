"""Verdicts as plain text, for every front end."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO

from mha.conformance.harness.known_bad.sources import seen_in
from mha.conformance.reports.entries import Entry, by_section, entries
from mha.conformance.reports.sentence import sentence
from mha.conformance.reports.summary import Tally, tally, total_rejections
from mha.conformance.results import NONCONFORMING, Report, Verdict, by_implementation, status_of
from mha.conformance.shown import visible as visible  # for those who show reports
from mha.conformance.shown import visible_line as visible_line
from mha.conformance.shown import visible_name as visible_name
from mha.spec.clauses import CLAUSES

# In characters.
LONGEST_SCRIPT, LONGEST_BRIEF = 100_000, 200
# In columns: of a line, unless the terminal is narrower, and of the labels of a description.
WIDTH, LABEL_WIDTH = 110, 11
INDENT = " " * 4
# A tensor as scripts name it: of the call with this number.
NUMBERED = re.compile(
    r"\b(?P<name>output|weights|query|key|value|mask)_(?P<number>\d+)(?P<index>(\.grad)?(\[[-\d,"
    r" :.]*\])?)"
)
# How a level reads beside a failure.
LEVELS = {"MAY": "MAY, and claimed"}
# Why a family blocks clauses of others.
FAMILY_FAILS = "which the same calls fail"
# What the quick profile leaves out, which may hide a failure.
QUICK = "profile quick: neither long rows nor rare sizes were tried; --profile default tries them"
# Of one cause, how many clauses are named.
MOST_CLAUSES = 8
# Below the text of an entry.
HANGING = " " * 24
# How the message on invalid input that is accepted begins; the section says so.
NOT_RAISED = "no exception was raised, though "
LISTED = (*NONCONFORMING, "waived", "harness_error")


def describe_changes(torch_changes: Collection[str]) -> str:
    """Return in a line what had been changed in torch before a run, empty if nothing had; see
    `Report`.
    """
    if not torch_changes:
        return ""
    changes = visible_line(", ".join(torch_changes))
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
    return f"{visible_name(verdict.implementation)}, {where(verdict)}"


def where(verdict: Verdict) -> str:
    """Return the dtype and the device of a verdict."""
    return f"{visible_name(verdict.dtype)} on {visible_name(verdict.device)}"


def brief(verdict: Verdict) -> str:
    """Return the diagnosis, if there is one, and the message in one short line."""
    message = brief_message(verdict)
    return (
        f"{visible_line(verdict.diagnosis, LONGEST_BRIEF)}: {message}"
        if verdict.diagnosis
        else message
    )


def brief_message(verdict: Verdict) -> str:
    """Return the message in one short line."""
    return textwrap.shorten(
        visible(_without_numbers(verdict.message)), LONGEST_BRIEF, placeholder=" ..."
    )


def _without_numbers(message: str) -> str:
    """Return a message without the numbers that tell the calls of its script apart: there may be
    two calls.

    >>> _without_numbers("output_2[0, 1] is 1, but should be 2")
    'output[0, 1] is 1, but should be 2'
    >>> _without_numbers("output_4[0] is 1, but should be 2, as in output_2[0]")
    'output[0] of the second call is 1, but should be 2, as in output[0] of the first call'
    """
    numbers = sorted({int(found["number"]) for found in NUMBERED.finditer(message)})
    calls = dict(zip(numbers, ("the first call", "the second call"), strict=False))

    def renamed(found: re.Match[str]) -> str:
        text = f"{found['name']}{found['index'] or ''}"
        return text if len(numbers) == 1 else f"{text} of {calls[int(found['number'])]}"

    return NUMBERED.sub(renamed, message) if len(numbers) <= 2 else message


def describe(verdict: Verdict, width: int = WIDTH) -> str:
    """Return everything that a user needs to know about a verdict that is not a pass; width: in
    columns.
    """
    clause, blocked = CLAUSES[verdict.clause], verdict.status == "blocked"
    level = visible_name(LEVELS.get(verdict.level, verdict.level))
    lines = [wrapped(f"{clause.id} ({level}): {clause.title}", width, ""), ""]
    lines += [_row(label, text, width) for label, text in _finding(verdict).items() if text]
    if verdict.case:
        case = visible_line(verdict.case)  # not wrapped, so that it can be copied
        lines.append(f"{'case':<{LABEL_WIDTH}}{case}")
    tried = f"{verdict.examples} case{'s' * (verdict.examples != 1)} tried"
    rows = {
        "sizes": _sizes(verdict.case or ""),
        "last call": visible(verdict.arguments),
        "blocked by": (
            f"{visible_name(verdict.blocked_by or '')}, which fails too: start there"
            if blocked
            else ""
        ),
        "judged": f"{subject(verdict)}; {tried}",
        "clause": clause.statement,
        "why": clause.why,
        "libraries": clause.differs,
        "source": clause.source,
    }
    lines += [_row(label, text, width) for label, text in rows.items() if text]
    if verdict.script and not blocked:
        hint = (
            "To reproduce it without the judge, save this script, which has the names above, and"
            " run it:"
        )
        lines += ["", wrapped(hint, width, ""), ""]
        lines.append(textwrap.indent(visible(verdict.script, LONGEST_SCRIPT), "    "))
    return "\n".join(lines)


def _finding(verdict: Verdict) -> dict[str, str]:
    """Return what is wrong and how that is usually mended, by label; a diagnosis knows more than
    the clause.
    """
    clause = CLAUSES[verdict.clause]
    fix = verdict.fix if verdict.diagnosis else clause.fix
    return {
        "diagnosis": (
            f"{visible(verdict.diagnosis)}; this gives the same output" if verdict.diagnosis else ""
        ),
        "seen in": seen_in(verdict.diagnosis),
        "message": visible(verdict.message),
        "steps": visible(verdict.steps),
        "usual fix": visible(fix) if verdict.status in ("fail", "waived") else "",
    }


def _sizes(code: str) -> str:
    """Return the sizes of a case, those at their defaults too, which its repr leaves out; empty
    without a case.
    """
    from mha.conformance.cases.parsing import (
        read_case,
    )  # with torch, which the names in this module do not need

    try:
        case = read_case(code)
        d_model = case.config.d_model
    except ValueError:  # of a report that someone else wrote
        return ""
    return f"B={case.B}, L={case.L}, S={case.S}, d_model={d_model}, n_heads={case.n_heads}"


def summarise(
    verdicts: Iterable[Verdict],
    *,
    incomplete: bool = False,
    width: int = WIDTH,
    failures: bool = True,
    profile: str = "",
    not_covered: Mapping[str, Collection[str]] | None = None,
) -> list[str]:
    """Return for each implementation what does not pass, by section, what was judged, and last the
    verdict.

    incomplete: the run was stopped, so clauses may be missing. width: in columns; a longer line
        continues below, indented. failures: whether to list what does not pass. profile: of the
        run; what the quick one leaves out is said.
    not_covered: what no clause judges, by the name of the implementation.
    """
    lines: list[str] = []
    for name, own in by_implementation(verdicts).items():
        lines += [""] if lines else []
        if failures:
            lines += listing(own, width)
        details = [*_blocked(own), *_evidence(own, profile, width - len(INDENT))]
        lines += [wrapped(line, width, INDENT, 2 * INDENT) for line in details]
        said = sentence(own, (not_covered or {}).get(name, ()))
        said = f"INCOMPLETE, so far: {said}" if incomplete else said
        lines.append(wrapped(f"{visible_name(name)}: {visible(said)}", width, "", INDENT))
    return lines


def summarise_report(report: Report, width: int = WIDTH) -> list[str]:
    """Return the summary of a report; width: in columns."""
    return summarise(
        report.verdicts,
        incomplete=report.incomplete,
        width=width,
        profile=report.profile,
        not_covered=report.not_covered,
    )


def listing(verdicts: Sequence[Verdict], width: int = WIDTH) -> list[str]:
    """Return what does not pass of an implementation: a title for each section, and an entry for
    each cause.
    """
    lines: list[str] = []
    for title, found in by_section(entries(verdicts)).items():
        lines.append(f"{title}:")
        for entry in found:
            lines += entry_lines(entry, width)
        lines.append("")
    return lines


def entry_lines(entry: Entry, width: int = WIDTH) -> list[str]:
    """Return an entry in a few lines; one that does not decide, in one."""
    first = entry.first
    places = ", ".join(dict.fromkeys(map(place, entry.verdicts)))
    head = f"{status_of(first):15} {_some(entry.clauses):7} {places}: "
    message = brief_message(first)
    if status_of(first) == "unmet SHOULD":
        shown = max(width - len(head), MOST_CLAUSES)
        return [
            head + textwrap.shorten(message.removeprefix(NOT_RAISED), shown, placeholder=" ...")
        ]
    if not entry.cause:
        return [wrapped(f"{head}{message}", width, "", HANGING)]
    lines = [wrapped(f"{head}{visible(entry.cause, LONGEST_BRIEF)}", width, "", HANGING)]
    lines.append(wrapped(f"{first.clause}: {message}", width, HANGING))
    if first.fix:
        lines.append(wrapped(f"usual fix: {visible(first.fix)}", width, HANGING))
    return lines


def place(verdict: Verdict) -> str:
    """Return the dtype, and the device if it is not the CPU."""
    return visible_name(verdict.dtype) if verdict.device == "cpu" else where(verdict)


def _some(clauses: Sequence[str]) -> str:
    """Return the first clauses of a list, and how many more there are."""
    if len(clauses) <= MOST_CLAUSES:
        return ", ".join(clauses)
    return f"{', '.join(clauses[:MOST_CLAUSES])} and {len(clauses) - MOST_CLAUSES} more"


def _evidence(verdicts: Sequence[Verdict], profile: str, width: int) -> Iterator[str]:
    """Yield on what the verdict rests: what was judged, and what was not, in lines of at most
    `width` columns.
    """
    counted = tally(verdicts)
    if not counted.judged:
        return
    examples, margin = sum(v.examples for v in verdicts), max(v.margin for v in verdicts)
    judged = f"{counted.judged} of {counted.clauses}" if counted.unjudged else str(counted.judged)
    clauses = "clause" if counted.clauses == 1 else "clauses"
    cases = "case" if examples == 1 else "cases"
    evidence = (
        f"judged: {judged} {clauses} on {examples} {cases}; largest error {margin:.2f} of its bound"
    )
    if (known_bad := total_rejections(verdicts)).tried:
        evidence += (
            f"; wrong answers put to the same cases: {known_bad.rejected} of {known_bad.tried}"
            " noticed"
        )
    yield evidence
    yield from _unjudged(counted, width)
    if profile == "quick" and counted.clauses > 1:
        yield QUICK


def _blocked(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield a line for each clause or family that blocks others."""
    grouped: dict[str, list[str]] = {}
    for verdict in verdicts:
        if verdict.status == "blocked":
            grouped.setdefault(verdict.blocked_by or "", []).append(verdict.clause)
    for cause, clauses in grouped.items():
        why = f"{CLAUSES[cause].title}, which fails too" if cause in CLAUSES else FAMILY_FAILS
        yield f"blocked by {visible_name(cause)} ({why}): {', '.join(dict.fromkeys(clauses))}"


def _unjudged(counted: Tally, width: int) -> Iterator[str]:
    """Yield a line with the reasons for which clauses were not judged, the rest of them together if
    they do not fit.
    """
    reasons = [f"{visible_name(reason)} ({number})" for reason, number in counted.unjudged.items()]
    numbers = list(counted.unjudged.values())
    for shown in range(len(reasons), -1, -1):
        others = [f"others ({sum(numbers[shown:])})"] if shown < len(reasons) else []
        line = f"not judged: {', '.join(reasons[:shown] + others)}"
        if reasons and (len(line) <= width or shown == 0):
            yield line
            return


def _row(label: str, text: str, width: int) -> str:
    if "\n" in text:  # a traceback of the judge keeps its lines
        return f"{label:<{LABEL_WIDTH}}{textwrap.indent(text.strip(), ' ' * LABEL_WIDTH).lstrip()}"
    return wrapped(text, width, f"{label:<{LABEL_WIDTH}}", " " * LABEL_WIDTH)


def width_of(stream: IO[str]) -> int:
    """Return how many columns to use: those of a terminal, and `WIDTH` at most and for a file or
    pipe.
    """
    return min(shutil.get_terminal_size().columns, WIDTH) if stream.isatty() else WIDTH


def fitted(text: str, stream: IO[str], indent: str = INDENT) -> str:
    """Return a text whose lines fit a terminal, except code, which is indented.

    It is unchanged for a file or pipe, where one may search for a line.
    """
    if not stream.isatty():
        return text
    width = width_of(stream)
    return "\n".join(
        line if line.startswith(" ") else wrapped(line, width, "", indent)
        for line in text.split("\n")
    )


def wrapped(text: str, width: int, first: str, rest: str | None = None) -> str:
    """Return a text in lines of at most `width` columns.

    Long words and code are never broken. first, rest: what the first line and the others begin
    with.

    >>> wrapped("one two three", 8, "", "  ")
    'one two\\n  three'
    """
    indent = first if rest is None else rest
    filler = textwrap.TextWrapper(
        width, first, indent, break_long_words=False, break_on_hyphens=False
    )
    return filler.fill(text)
