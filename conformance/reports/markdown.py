"""A report as Markdown, short enough for a comment on a pull request: a matrix, and failures."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from itertools import chain

from mha.conformance.reports.entries import entries
from mha.conformance.reports.sentence import sentence_of
from mha.conformance.reports.summary import (
    cause_of,
    cells_by_family,
    is_failure,
    legend,
    outcome,
    tally,
)
from mha.conformance.reports.text import (
    brief_message,
    seeds_of,
    subject,
    visible,
    visible_line,
    visible_name,
)
from mha.conformance.results import Report, Verdict, status_of
from mha.conformance.shown import LONGEST_NAME, markdown_line
from mha.spec.clauses import CLAUSES, KINDS

# A comment on GitHub holds 65,536 characters.
MOST_FAILURES, LONGEST_CASE = 40, 300


def to_markdown(report: Report) -> str:
    """Return a table of implementations and families, and each failure, the most severe first."""
    failures = [entry for entry in entries(report.verdicts) if is_failure(entry.first)]
    lines = [
        "## Multi-head attention conformance report",
        "",
        _facts(report),
        "",
        *_sentences(report),
        "",
    ]
    lines += [*_matrix(report), ""]
    for entry in failures[:MOST_FAILURES]:
        lines += _details(entry.verdicts)
    if len(failures) > MOST_FAILURES:
        lines.append(f"And {len(failures) - MOST_FAILURES} more failures.")
    return "\n".join(lines).rstrip()


def _facts(report: Report) -> str:
    versions = [f"{name} {number}" for name, number in report.versions.items()]
    facts = [f"profile {report.profile}", seeds_of(report), *versions]
    line = markdown_line(visible_line(", ".join(facts), LONGEST_NAME * len(facts)))
    if report.incomplete:
        return f"INCOMPLETE: the run was stopped. {line}."
    return f"{line}."


def _sentences(report: Report) -> Iterator[str]:
    """Yield the verdict on each implementation."""
    for name in report.by_implementation:
        said = markdown_line(visible(sentence_of(report, name)))
        yield f"- `{_code(visible_name(name))}`: {said}"


def _matrix(report: Report) -> Iterator[str]:
    """Yield the lines of the table, and what its columns and signs mean."""
    rows = {name: cells_by_family(own) for name, own in report.by_implementation.items()}
    families = list(dict.fromkeys(chain.from_iterable(rows.values())))
    headings = ["outcome", "judged", *KINDS, *families]
    yield f"| | {' | '.join(headings)} |"
    yield "|---|" + "---|" * len(headings)
    signs: set[str] = set()
    for name, own in report.by_implementation.items():
        row = [f"`{_code(visible_name(name))}`", outcome(own), *_counts(own)]
        cells = rows[name]
        for letters in families:
            row.append(cells[letters].text if letters in cells else "")
        signs.update(cell.sign for cell in cells.values())
        yield f"| {' | '.join(row)} |"
    yield ""
    kinds = ", ".join(f"{kind} ({meaning.removesuffix('.')})" for kind, meaning in KINDS.items())
    yield f"Clauses that pass, of those judged, by kind: {kinds}."
    yield ""
    yield ", ".join(legend(signs)) + "; a number counts clauses."


def _counts(verdicts: Sequence[Verdict]) -> list[str]:
    """Return how many clauses were judged, and for each kind how many pass."""
    totals = tally(verdicts)
    counts = [f"{totals.judged} of {totals.clauses}"]
    for kind in KINDS:
        count = str(totals.must.get(kind, "-"))
        if kind in totals.should:
            count += f" (SHOULD {totals.should[kind]})"
        counts.append(count)
    return counts


def _details(same: Sequence[Verdict]) -> list[str]:
    """Return a block about failures of one cause, which opens to the message and the case."""
    verdict, cause = same[0], visible_line(cause_of(same))
    subjects = ", ".join(dict.fromkeys(map(subject, same)))
    if cause:
        heading = f"{status_of(verdict)} {cause}, {subjects}"
    else:
        title = CLAUSES[verdict.clause].title
        heading = f"{status_of(verdict)} {verdict.clause}, {subjects}: {title}"
    lines = [
        "<details>",
        f"<summary>{html.escape(heading)}</summary>",
        "",
        markdown_line(brief_message(verdict)),
        "",
    ]
    if verdict.fix:
        lines += [f"Usual fix: {markdown_line(visible(verdict.fix))}", ""]
    if verdict.case:
        lines += [f"Case: `{_code(visible(verdict.case, LONGEST_CASE))}`", ""]
    return [*lines, "</details>", ""]


def _code(text: str) -> str:
    """Return a text that can stand between backticks, also in a table."""
    return text.replace("`", "'").replace("|", "¦").replace("\n", " ")
