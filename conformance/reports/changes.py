"""A comparison of two reports in a file: the format is chosen by the suffix."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mha.conformance.reports.compare import Comparison, blocks, notes, unchanged
from mha.conformance.reports.html import page, resource
from mha.conformance.reports.layout import counted
from mha.conformance.reports.summary import clauses_in, findings
from mha.conformance.reports.text import visible_name
from mha.conformance.reports.writing import write_text
from mha.conformance.results import Report, Verdict, status_of
from mha.conformance.shown import markdown_line

# What the JSON says about each run as a whole.
RUN_FIELDS = (
    "profile",
    "seed",
    "strict",
    "versions",
    "targets",
    "started",
    "host",
    "incomplete",
    "exit_status",
)
# The colour of each exit status, as a class of the CSS.
STATES = ("pass", "fail", "waived")
TITLE = "Multi-head attention conformance: two runs compared"


def write_changes(comparison: Comparison, file: Path) -> str:
    """Write a comparison in the format of the file's suffix; return an error message, or ""."""
    try:
        write_text(file, f"{FORMATS[file.suffix](comparison)}\n")
    except OSError as error:
        return f"the comparison cannot be written to {str(file)!r}: {error.strerror}"
    return ""


def to_markdown(comparison: Comparison) -> str:
    """Return a heading for each part of a comparison, with a list of its entries."""
    lines = [f"## {TITLE}", "", *_items(_facts(comparison))]
    for block in blocks(comparison):
        lines += ["", f"### {block.heading.capitalize()}", "", *_items(block.entries)]
    return "\n".join([*lines, "", f"{unchanged(comparison).capitalize()}."])


def _items(texts: Iterable[str]) -> list[str]:
    """Return the items of a list in Markdown."""
    return [f"- {markdown_line(text)}" for text in texts]


def to_html(comparison: Comparison) -> str:
    """Return the same as a page that loads nothing else, and that begins with what decides."""
    failures, fixed = len(findings(comparison.new_failures)), len(findings(comparison.fixed))
    headline = f"{counted(failures, 'new failure')}, {fixed} fixed"
    return page("page.changes.html.j2").render(
        title=TITLE,
        headline=headline,
        state=STATES[comparison.exit_status],
        facts=_facts(comparison),
        blocks=blocks(comparison),
        unchanged=unchanged(comparison),
        css=resource("page.css"),
    )


def to_json(comparison: Comparison) -> str:
    """Return a comparison as JSON, with the verdicts of each cause."""
    settings = []
    for name, old, new in comparison.settings:
        settings.append({"name": name, "before": old, "after": new})
    data = {
        "exit_status": comparison.exit_status,
        "before": _run(comparison.before),
        "after": _run(comparison.after),
        "settings": settings,
        "new_failures": _causes(comparison.new_failures),
        "fixed": _causes(comparison.fixed),
        "still_failing": _causes(comparison.still_failing),
        "changed": _pairs(comparison.changed),
        "less_accurate": _pairs(comparison.less_accurate),
        "slower": [each._asdict() for each in comparison.slower],
        "no_longer_judged": list(map(asdict, comparison.no_longer_judged)),
        "unchanged": comparison.unchanged,
        "judged": len(comparison.after.verdicts),
    }
    return json.dumps(data, indent=2)


# The suffixes are those of a report.
FORMATS: dict[str, Callable[[Comparison], str]] = {
    ".html": to_html,
    ".json": to_json,
    ".md": to_markdown,
}


def _facts(comparison: Comparison) -> list[str]:
    """Return when both runs were, and everything that may explain a change."""
    before, now = visible_name(_when(comparison.before)), visible_name(_when(comparison.after))
    return [f"before: {before}", f"now: {now}", *notes(comparison)]


def _when(report: Report) -> str:
    return ", ".join(filter(None, [report.started, report.host, f"profile {report.profile}"]))


def _run(report: Report) -> dict[str, Any]:
    """Return what the JSON says about a run as a whole."""
    return {name: getattr(report, name) for name in RUN_FIELDS}


def _pairs(changes: Iterable[tuple[Verdict, Verdict]]) -> list[dict[str, Any]]:
    return [{"before": asdict(old), "after": asdict(new)} for old, new in changes]


def _causes(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    """Return the verdicts by cause: those with one diagnosis, and otherwise those of one clause."""
    return [_cause(same) for same in findings(verdicts)]


def _cause(same: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "implementation": same[0].implementation,
        "diagnosis": same[0].diagnosis,
        "status": status_of(same[0]),
        "clauses": clauses_in(same),
        "verdicts": list(map(asdict, same)),
    }
