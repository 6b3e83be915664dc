"""A report as Markdown, for a pull request: what is wrong first, short enough to be read there."""

from __future__ import annotations

import html
import re

from mha.conformance.reports.summary import cell_of, families_of, legend, outcome, share, status_of
from mha.conformance.reports.text import LONGEST_NAME, brief, judged, shown, visible
from mha.conformance.results import NONCONFORMING, Report, Verdict
from mha.spec import CLAUSES

# A comment of GitHub holds 65,536 characters.
MOST_FAILURES = 40


def to_markdown(report: Report) -> str:
    """Return the matrix by families, and each failure with its smallest case."""
    rows = {name: families_of(own) for name, own in report.by_implementation.items()}
    families = list(dict.fromkeys(letters for row in rows.values() for letters in row))
    told = "INCOMPLETE: the run was stopped. " if report.incomplete else ""
    facts = [f"profile {report.profile}", f"seed {report.seed}", *(f"{n} {v}" for n, v in report.versions.items())]
    run = _text(visible(", ".join(facts), LONGEST_NAME * len(facts)).replace("\n", " "))
    lines = ["## Conformance of multi-head attention", "", f"{told}{run}.", ""]
    lines += ["| | outcome | met | " + " | ".join(families) + " |", "|---|---|---|" + "---|" * len(families)]
    signs = set()
    for name, own in report.by_implementation.items():
        cells = [cell_of(rows[name][letters]) if letters in rows[name] else None for letters in families]
        signs |= {cell.sign for cell in cells if cell}
        met, claimed = share(own)
        start = [f"`{_code(shown(own[0].implementation))}`", outcome(own), f"{met} of {claimed}"]
        lines.append("| " + " | ".join([*start, *(cell.text if cell else "" for cell in cells)]) + " |")
    lines += ["", ", ".join(legend(signs)) + "; the number is of clauses.", ""]
    failures = [v for v in report.verdicts if v.required and v.status in (*NONCONFORMING, "harness_error")]
    for verdict in failures[:MOST_FAILURES]:
        lines += _failure(verdict)
    if len(failures) > MOST_FAILURES:
        lines.append(f"And {len(failures) - MOST_FAILURES} more.")
    return "\n".join(lines).rstrip() + "\n"


def _failure(verdict: Verdict) -> list[str]:
    told = f"{status_of(verdict)} {verdict.clause}, {judged(verdict)}: {CLAUSES[verdict.clause].title}"
    lines = ["<details>", f"<summary>{html.escape(told)}</summary>", "", _text(brief(verdict)), ""]
    if verdict.case:
        lines += [f"Case: `{_code(visible(verdict.case, 300))}`", ""]
    return [*lines, "</details>", ""]


def _code(text: str) -> str:
    """Return a text as it can stand between backticks, also in a table."""
    return text.replace("`", "'").replace("|", "¦").replace("\n", " ")


def _text(text: str) -> str:
    """Return a text in which nothing is markup but code between backticks."""
    return re.sub(r"([\\*_\[\]#@])", r"\\\1", html.escape(text, quote=False))
