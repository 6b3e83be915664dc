"""Verdicts as plain text, for every front end."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence

from mha.conformance.reports.summary import count_clauses, count_statuses, outcome, status_of, total_rejections
from mha.conformance.results import NONCONFORMING, Verdict, by_implementation
from mha.spec.clauses import CLAUSES

# In characters; the JSON has the whole of a longer text.
LONGEST_TEXT, LONGEST_NAME, LONGEST_SCRIPT, LONGEST_BRIEF = 4000, 80, 100_000, 200
# In columns: of a line, unless the terminal is narrower, and of the labels of a description.
WIDTH, LABEL_WIDTH = 110, 11
# How a level reads beside a failure.
LEVELS = {"MAY": "MAY, and claimed"}
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


def subject(verdict: Verdict) -> str:
    """Return what a verdict is about: the implementation, the dtype and the device."""
    return f"{visible_name(verdict.implementation)}, {verdict.dtype} on {verdict.device}"


def brief(verdict: Verdict) -> str:
    """Return the message in one short line."""
    return textwrap.shorten(visible(verdict.message), LONGEST_BRIEF, placeholder=" ...")


def describe(verdict: Verdict, width: int = WIDTH) -> str:
    """Return everything that a user needs to know about a verdict that is not a pass; width: in columns."""
    clause = CLAUSES[verdict.clause]
    lines = [f"{clause.id} ({LEVELS.get(verdict.level, verdict.level)}): {clause.title}", ""]
    if verdict.message:
        lines.append(_row("message", visible(verdict.message), width))
    if verdict.case:
        case = visible(verdict.case).replace("\n", " ")  # not wrapped, so that it can be copied
        lines.append(f"{'case':<{LABEL_WIDTH}}{case}")
    tried = f"{verdict.examples} case{'s' * (verdict.examples != 1)} tried"
    rows = {
        "sizes": _sizes(verdict.case or ""),
        "blocked by": verdict.blocked_by or "",
        "judged": f"{subject(verdict)}; {tried}",
        "clause": clause.statement,
        "libraries": clause.differs,
        "source": clause.source,
    }
    lines += [_row(label, text, width) for label, text in rows.items() if text]
    if verdict.script:
        lines += ["", "To reproduce it without the judge, save this script, which has the names above, and run it:", ""]
        lines.append(textwrap.indent(visible(verdict.script, LONGEST_SCRIPT), "    "))
    return "\n".join(lines)


def _sizes(code: str) -> str:
    """Return the sizes of a case, those at their defaults too, which its repr leaves out; empty without a case."""
    from mha.conformance.cases.parsing import read_case  # with torch, which the names in this module do not need

    try:
        case = read_case(code)
    except ValueError:  # of a report that someone else wrote
        return ""
    return f"B={case.B}, L={case.L}, S={case.S}, d_model={case.config.d_model}, n_heads={case.n_heads}"


def summarise(verdicts: Iterable[Verdict], *, incomplete: bool = False, width: int = WIDTH) -> list[str]:
    """Return for each implementation its outcome, a line for each clause that does not pass, and its totals.

    What blocks other clauses comes first. incomplete: the run was stopped, so clauses may be missing. width: in
    columns; a longer line continues below, indented.
    """
    lines = []
    for own in by_implementation(verdicts).values():
        lines.append(_wrapped(_headline(own, incomplete), width, "", " " * 8))
        lines += [_wrapped(line, width, "    ", " " * 8) for line in (*_failures(own), *_blocked(own), _totals(own))]
    return lines


def _headline(verdicts: Sequence[Verdict], incomplete: bool) -> str:
    whole = f"INCOMPLETE, so far: {outcome(verdicts)}" if incomplete else outcome(verdicts)
    examples, margin = sum(v.examples for v in verdicts), max(v.margin for v in verdicts)
    counts = f"{count_statuses(verdicts)}; {examples} cases, largest error/bound {margin:.2f}"
    return f"{visible_name(verdicts[0].implementation)}: {whole} ({counts})"


def _failures(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield a line for each clause that fails or is waived in its own right."""
    blocking = {verdict.blocked_by for verdict in verdicts if verdict.blocked_by}
    grouped: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.status in LISTED and not verdict.blocked_by:
            grouped.setdefault((verdict.clause, status_of(verdict)), []).append(verdict)
    for clause, status in sorted(grouped, key=lambda key: _rank(key[0], blocking)):
        same = grouped[clause, status]
        where = ", ".join(f"{verdict.dtype} {verdict.device}" for verdict in same)
        yield f"{status} {clause} ({where}): {brief(same[0])}"


def _blocked(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield a line for each clause or family that blocks others."""
    grouped: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.blocked_by:
            grouped.setdefault(verdict.blocked_by, []).append(verdict)
    for cause, blocked in grouped.items():
        clauses = ", ".join(dict.fromkeys(verdict.clause for verdict in blocked))
        yield f"blocked by {cause}: {clauses} could not be judged: {brief(blocked[0])}"


def _totals(verdicts: Sequence[Verdict]) -> str:
    """Return how many clauses pass and how sensitive their cases are, or why none was judged."""
    passing, claimed = count_clauses(verdicts)
    if not claimed:
        return visible("; ".join(dict.fromkeys(verdict.message for verdict in verdicts)))
    line, counts = f"{passing}/{claimed} claimed clauses pass", total_rejections(verdicts)
    if not counts.tried:
        return line
    return f"{line}; self-test: {counts.rejected / counts.tried:.0%} of {counts.tried} known-bad answers rejected"


def _rank(clause: str, blocking: Collection[str]) -> tuple[bool, int]:
    """Return a sort key: what blocks other clauses comes first, then the order of the contract."""
    return clause not in blocking and CLAUSES[clause].family not in blocking, list(CLAUSES).index(clause)


def _row(label: str, text: str, width: int) -> str:
    if "\n" in text:  # a traceback of the judge keeps its lines
        return f"{label:<{LABEL_WIDTH}}{textwrap.indent(text.strip(), ' ' * LABEL_WIDTH).lstrip()}"
    return _wrapped(text, width, f"{label:<{LABEL_WIDTH}}", " " * LABEL_WIDTH)


def _wrapped(text: str, width: int, first: str, rest: str | None = None) -> str:
    """Return a text in lines of at most `width` columns; first, rest: what the first and the other lines begin with."""
    indent = first if rest is None else rest
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False)
