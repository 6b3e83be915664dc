"""A report as Markdown, short enough for a comment on a pull request: the matrix, then the
failures.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from mha.conformance.reports.entries import entries
from mha.conformance.reports.sentence import sentence_of
from mha.conformance.reports.summary import (
    by_family,
    cause_of,
    cell_of,
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
    """Return a table of implementations and families, and each failure with its minimal case, the
    most severe first.
    """
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
    facts = [
        f"profile {report.profile}",
        seeds_of(report),
        *(f"{n} {v}" for n, v in report.versions.items()),
    ]
    line = visible_line(", ".join(facts), LONGEST_NAME * len(facts))
    return (
        f"{'INCOMPLETE: the run was stopped. ' if report.incomplete else ''}{markdown_line(line)}."
    )


def _sentences(report: Report) -> Iterator[str]:
    """Yield the verdict on each implementation."""
    for name in report.by_implementation:
        yield (
            f"- `{_code(visible_name(name))}`: {markdown_line(visible(sentence_of(report, name)))}"
        )


def _matrix(report: Report) -> Iterator[str]:
    """Yield the lines of the table, and what its columns and signs mean."""
    rows = {name: by_family(own) for name, own in report.by_implementation.items()}
    families = list(dict.fromkeys(letters for row in rows.values() for letters in row))
    yield "| | " + " | ".join(["outcome", "judged", *KINDS, *families]) + " |"
    yield "|" + "---|" * (3 + len(KINDS) + len(families))
    signs = set()
    for name, own in report.by_implementation.items():
        cells = {letters: cell_of(members) for letters, members in rows[name].items()}
        signs |= {cell.sign for cell in cells.values()}
        texts = (cells[letters].text if letters in cells else "" for letters in families)
        yield (
            f"| `{_code(visible_name(name))}` | "
            + " | ".join([outcome(own), *_counts(own), *texts])
            + " |"
        )
    yield ""
    kinds = ", ".join(f"{kind} ({meaning.removesuffix('.')})" for kind, meaning in KINDS.items())
    yield f"Clauses that pass, of those judged, by kind: {kinds}."
    yield ""
    yield ", ".join(legend(signs)) + "; a number counts clauses."


def _counts(verdicts: Sequence[Verdict]) -> list[str]:
    """Return how many clauses were judged, and for each kind how many pass."""
    counted = tally(verdicts)
    required = [str(counted.must.get(kind, "-")) for kind in KINDS]
    recommended = [
        f" (SHOULD {counted.should[kind]})" if kind in counted.should else "" for kind in KINDS
    ]
    return [f"{counted.judged} of {counted.clauses}", *map(str.__add__, required, recommended)]


def _details(same: Sequence[Verdict]) -> list[str]:
    """Return a block that opens to the message and the case of failures of one cause, or of one
    clause.
    """
    verdict, cause = same[0], visible_line(cause_of(same))
    subjects = ", ".join(dict.fromkeys(map(subject, same)))
    heading = f"{status_of(verdict)} {cause or verdict.clause}, {subjects}"
    heading += "" if cause else f": {CLAUSES[verdict.clause].title}"
    lines = [
        "<details>",
        f"<summary>{html.escape(heading)}</summary>",
        "",
        markdown_line(brief_message(verdict)),
        "",
    ]
    lines += [f"Usual fix: {markdown_line(visible(verdict.fix))}", ""] if verdict.fix else []
    if verdict.case:
        lines += [f"Case: `{_code(visible(verdict.case, LONGEST_CASE))}`", ""]
    return [*lines, "</details>", ""]


def _code(text: str) -> str:
    """Return a text that can stand between backticks, also in a table."""
    return text.replace("`", "'").replace("|", "¦").replace("\n", " ")
