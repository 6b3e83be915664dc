"""Failures as annotations of GitHub Actions, which its runner shows beside a pull request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from mha.conformance.reports.markdown import to_markdown
from mha.conformance.reports.sentence import sentence_of
from mha.conformance.reports.summary import is_failure, outcome, severity
from mha.conformance.reports.text import LISTED, brief, visible, visible_name
from mha.conformance.results import Report
from mha.spec.clauses import CLAUSES


def runner_annotations(report: Report) -> list[str]:
    """Return the annotations, or none where this is not a run of GitHub Actions."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return []
    return list(workflow_commands(report))


def write_step_summary(report: Report) -> str:
    """Add the report to the summary of a step of GitHub Actions; return a warning, or ""."""
    file = os.environ.get("GITHUB_STEP_SUMMARY")
    if not file:
        return ""
    try:
        with Path(file).open("a", encoding="utf-8", errors="backslashreplace") as summary:
            summary.write(f"{to_markdown(report)}\n")
    except OSError as error:
        return f"the summary of the step, {file!r}, cannot be written: {error.strerror}"
    return ""


def workflow_commands(report: Report) -> Iterator[str]:
    """Yield a command for each failure: an error, or a notice if it is waived or an unmet SHOULD.

    The runner shows only the first few of a step, so the most severe come first. A notice with the
    verdict follows for each implementation that has any failure.
    """
    grouped = report.by_implementation
    # In the order of the report, implementation by implementation, where they are equally severe.
    ordered = chain.from_iterable(grouped.values())
    failures = [verdict for verdict in ordered if verdict.status in LISTED]
    for verdict in sorted(failures, key=severity):
        name, dtype = visible_name(verdict.implementation), visible_name(verdict.dtype)
        title = f"{verdict.clause} {name} {dtype}: {CLAUSES[verdict.clause].title}"
        message = brief(verdict)
        if verdict.case:
            message += f" ({visible(verdict.case)})"
        yield _command("error" if is_failure(verdict) else "notice", title, message)
    failing = {verdict.implementation for verdict in failures}
    for name, own in grouped.items():
        if name in failing:
            said = visible(sentence_of(report, name))
            yield _command("notice", f"{visible_name(name)}: {outcome(own)}", said)


def _command(kind: str, title: str, message: str) -> str:
    title = _escaped(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={title}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
