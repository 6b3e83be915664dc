"""Verdicts as plain text, for every front end."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from mha.conformance.harness.known_bad.sources import seen_in
from mha.conformance.reports.entries import Entry, by_section, entries
from mha.conformance.reports.layout import INDENT, WIDTH, counted, first_few, shortened, wrapped
from mha.conformance.reports.links import clause_page
from mha.conformance.reports.sentence import sentence
from mha.conformance.reports.summary import Tally, tally, total_rejections
from mha.conformance.results import NONCONFORMING, Report, Verdict, by_implementation, status_of
from mha.conformance.shown import visible as visible  # for those who show reports
from mha.conformance.shown import visible_line as visible_line
from mha.conformance.shown import visible_name as visible_name
from mha.spec.clauses import CLAUSES

# In characters.
LONGEST_SCRIPT, LONGEST_BRIEF = 100_000, 200
# In columns, of the labels of a description.
LABEL_WIDTH = 11
# A tensor as scripts name it: of the call with this number.
NUMBERED = re.compile(
    r"\b(?P<name>output|weights|query|key|value|mask)_(?P<number>\d+)"
    r"(?P<index>(\.grad)?(\[[-\d, :.]*\])?)"
)
CALLS = ("the first call", "the second call")
# How a level reads beside a failure.
LEVELS = {"MAY": "MAY, and claimed"}
# Why a family blocks clauses of others.
FAMILY_FAILS = "which the same calls fail"
# What the quick profile leaves out, which may hide a failure.
QUICK = "profile quick: neither long rows nor rare sizes were tried; --profile default tries them"
# Of one cause, how many clauses are named.
MOST_CLAUSES = 8
# In characters, of the message of advice, in a terminal however narrow.
SHORTEST_ADVICE = 8
# In columns, of a status and of clauses at the start of a line; and what its rest is indented by.
STATUS_WIDTH, CLAUSE_WIDTH = 15, 7
HANGING = " " * (STATUS_WIDTH + 1 + CLAUSE_WIDTH + 1)
# How the message on invalid input that is accepted begins; the section says so.
NOT_RAISED = "no exception was raised, though "
# Above a script.
HOW_TO_REPRODUCE = (
    "To reproduce it without the judge, save this script, which has the names above, and run it:"
)
LISTED = (*NONCONFORMING, "waived", "harness_error")


def describe_changes(torch_changes: Collection[str]) -> str:
    """Return in a line what had been changed in torch before a run (see `Report`), or ""."""
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


def place(verdict: Verdict) -> str:
    """Return the dtype, and the device if it is not the CPU."""
    return visible_name(verdict.dtype) if verdict.device == "cpu" else where(verdict)


def brief(verdict: Verdict) -> str:
    """Return the diagnosis, if there is one, and the message in one short line."""
    message = brief_message(verdict)
    if not verdict.diagnosis:
        return message
    return f"{visible_line(verdict.diagnosis, LONGEST_BRIEF)}: {message}"


def brief_message(verdict: Verdict) -> str:
    """Return the message in one short line."""
    return shortened(visible(_without_numbers(verdict.message)), LONGEST_BRIEF)


def _without_numbers(message: str) -> str:
    """Return a message without the numbers of calls in its script, where it names one or two.

    >>> _without_numbers("output_2[0, 1] is 1, but should be 2")
    'output[0, 1] is 1, but should be 2'
    >>> _without_numbers("output_4[0] is 1, but should be 2, as in output_2[0]")
    'output[0] of the second call is 1, but should be 2, as in output[0] of the first call'
    """
    numbers = sorted({int(found["number"]) for found in NUMBERED.finditer(message)})
    if len(numbers) > len(CALLS):
        return message
    calls = dict(zip(numbers, CALLS, strict=False))

    def renamed(found: re.Match[str]) -> str:
        text = f"{found['name']}{found['index'] or ''}"
        if len(numbers) == 1:
            return text
        return f"{text} of {calls[int(found['number'])]}"

    return NUMBERED.sub(renamed, message)


def describe(verdict: Verdict, width: int = WIDTH) -> str:
    """Return all about a verdict that is not a pass; width: in columns."""
    clause = CLAUSES[verdict.clause]
    level = visible_name(LEVELS.get(verdict.level, verdict.level))
    lines = [wrapped(f"{clause.id} ({level}): {clause.title}", width, ""), ""]
    lines += _rows(_finding(verdict), width)
    if verdict.case:
        case = visible_line(verdict.case)  # not wrapped, so that it can be copied
        lines.append(f"{'case':<{LABEL_WIDTH}}{case}")
    lines += _rows(_circumstances(verdict), width)
    if verdict.script and verdict.status != "blocked":
        script = textwrap.indent(visible(verdict.script, LONGEST_SCRIPT), INDENT)
        lines += ["", wrapped(HOW_TO_REPRODUCE, width, ""), "", script]
    return "\n".join(lines)


def _finding(verdict: Verdict) -> dict[str, str]:
    """Return by label what is wrong and how to mend it; a diagnosis knows more than the clause."""
    rows = {
        "diagnosis": "",
        "seen in": seen_in(verdict.diagnosis),
        "message": visible(verdict.message),
        "steps": visible(verdict.steps),
    }
    fix = CLAUSES[verdict.clause].fix
    if verdict.diagnosis:
        rows["diagnosis"] = f"{visible(verdict.diagnosis)}; this gives the same output"
        fix = verdict.fix
    if verdict.status in ("fail", "waived"):
        rows["usual fix"] = visible(fix)
    return rows


def _circumstances(verdict: Verdict) -> dict[str, str]:
    """Return by label on what a verdict was reached, and what its clause says."""
    clause = CLAUSES[verdict.clause]
    rows = {"sizes": _sizes(verdict.case or ""), "last call": visible(verdict.arguments)}
    if verdict.status == "blocked":
        cause = visible_name(verdict.blocked_by or "")
        rows["blocked by"] = f"{cause}, which fails too: start there"
    return rows | {
        "judged": f"{subject(verdict)}; {counted(verdict.examples, 'case')} tried",
        "clause": clause.statement,
        "why": clause.why,
        "libraries": clause.differs,
        "source": clause.source,
        "more": f"mha spec {clause.id}, or {clause_page(clause.id)}",
    }


def _sizes(code: str) -> str:
    """Return the sizes of a case, also defaults, which its repr leaves out; "" without a case."""
    # With torch, which the names in this module do not need.
    from mha.conformance.cases.parsing import read_case

    try:
        case = read_case(code)
        d_model = case.config.d_model
    except ValueError:  # of a report that someone else wrote
        return ""
    return f"B={case.B}, L={case.L}, S={case.S}, d_model={d_model}, n_heads={case.n_heads}"


def _rows(texts: Mapping[str, str], width: int) -> Iterator[str]:
    """Yield a row for each text that is not empty, with its label."""
    for label, text in texts.items():
        head = f"{label:<{LABEL_WIDTH}}"
        hanging = " " * LABEL_WIDTH
        if "\n" in text:  # a traceback of the judge keeps its lines
            yield head + textwrap.indent(text.strip(), hanging).lstrip()
        elif text:
            yield wrapped(text, width, head, hanging)


def summarise(
    verdicts: Iterable[Verdict],
    *,
    incomplete: bool = False,
    width: int = WIDTH,
    failures: bool = True,
    profile: str = "",
    not_covered: Mapping[str, Collection[str]] | None = None,
) -> list[str]:
    """Return what does not pass of each implementation, what was judged, and last the verdict.

    incomplete: the run was stopped, so clauses may be missing.
    width: in columns; a longer line continues below, indented.
    failures: whether to list what does not pass.
    profile: of the run; the summary says what the quick one leaves out.
    not_covered: what no clause judges, by the name of the implementation.
    """
    options = not_covered or {}
    lines: list[str] = []
    for name, own in by_implementation(verdicts).items():
        if lines:
            lines.append("")
        if failures:
            lines += listing(own, width)
        for detail in (*_blocked(own), *_evidence(own, profile, width - len(INDENT))):
            lines.append(wrapped(detail, width, INDENT, 2 * INDENT))
        said = sentence(own, options.get(name, ()))
        if incomplete:
            said = f"INCOMPLETE, so far: {said}"
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


def in_columns(status: str, clauses: str, text: str) -> str:
    """Return a line with a status, clauses and a text, aligned with other such lines."""
    return f"{status:{STATUS_WIDTH}} {clauses:{CLAUSE_WIDTH}} {text}"


def listing(verdicts: Sequence[Verdict], width: int = WIDTH) -> list[str]:
    """Return what does not pass: a title for each section, and an entry for each cause."""
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
    clauses = first_few(entry.clauses, MOST_CLAUSES)
    head = in_columns(status_of(first), clauses, f"{places}: ")
    message = brief_message(first)
    if status_of(first) == "unmet SHOULD":
        shown = max(width - len(head), SHORTEST_ADVICE)
        return [head + shortened(message.removeprefix(NOT_RAISED), shown)]
    if not entry.cause:
        return [wrapped(f"{head}{message}", width, "", HANGING)]
    lines = [wrapped(f"{head}{visible(entry.cause, LONGEST_BRIEF)}", width, "", HANGING)]
    lines.append(wrapped(f"{first.clause}: {message}", width, HANGING))
    if first.fix:
        lines.append(wrapped(f"usual fix: {visible(first.fix)}", width, HANGING))
    return lines


def _evidence(verdicts: Sequence[Verdict], profile: str, width: int) -> Iterator[str]:
    """Yield on what the verdict rests, and what was not judged; width: of a line, in columns."""
    totals = tally(verdicts)
    if not totals.judged:
        return
    judged = counted(totals.clauses, "clause")
    if totals.unjudged:
        judged = f"{totals.judged} of {judged}"
    cases = counted(sum(verdict.examples for verdict in verdicts), "case")
    margin = max(verdict.margin for verdict in verdicts)
    evidence = f"judged: {judged} on {cases}; largest error {margin:.2f} of its bound"
    known_bad = total_rejections(verdicts)
    if known_bad.tried:
        noticed = f"{known_bad.rejected} of {known_bad.tried} noticed"
        evidence += f"; wrong answers put to the same cases: {noticed}"
    yield evidence
    yield from _unjudged(totals, width)
    if profile == "quick" and totals.clauses > 1:
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


def _unjudged(totals: Tally, width: int) -> Iterator[str]:
    """Yield a line with the reasons for which clauses were not judged, if there are any.

    The least frequent ones are counted together if they do not fit.
    """
    reasons = [f"{visible_name(reason)} ({number})" for reason, number in totals.unjudged.items()]
    if not reasons:
        return
    line = f"not judged: {', '.join(reasons)}"
    others = 0
    for number in reversed(totals.unjudged.values()):
        if len(line) <= width:
            break
        reasons.pop()
        others += number
        line = f"not judged: {', '.join([*reasons, f'others ({others})'])}"
    yield line
