"""Failures as annotations of GitHub Actions, which its runner shows beside a pull request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mha.conformance.reports.markdown import to_markdown
from mha.conformance.reports.sentence import sentence_of
from mha.conformance.reports.summary import is_failure, outcome, severity
from mha.conformance.reports.text import LISTED, brief, visible, visible_name
from mha.conformance.results import Report
from mha.spec.clauses import CLAUSES


def runner_annotations(report: Report) -> list[str]:
    """Return the annotations, or none where this is not a run of GitHub Actions."""
    return list(workflow_commands(report)) if os.environ.get("GITHUB_ACTIONS") == "true" else []


def write_step_summary(report: Report) -> str:
    """Add the report to the summary of the step, where GitHub Actions asks for one; return a
    warning, or "".
    """
    file = os.environ.get("GITHUB_STEP_SUMMARY")
    try:
        if file:
            with Path(file).open("a", encoding="utf-8", errors="backslashreplace") as summary:
                summary.write(f"{to_markdown(report)}\n")
    except OSError as error:
        return f"the summary of the step, {file!r}, cannot be written: {error.strerror}"
    return ""


def workflow_commands(report: Report) -> Iterator[str]:
    """Yield a workflow command for each failure: an error, or a notice if it is waived or an unmet
    SHOULD.

    The runner shows only the first few of a step, so the most severe come first. A notice with the
    verdict follows for each implementation that has any failure.
    """
    grouped = report.by_implementation
    failures = {name: [v for v in own if v.status in LISTED] for name, own in grouped.items()}
    for verdict in sorted((verdict for own in failures.values() for verdict in own), key=severity):
        title = (
            f"{verdict.clause} {visible_name(verdict.implementation)} {visible_name(verdict.dtype)}"
        )
        message = f"{brief(verdict)} ({visible(verdict.case)})" if verdict.case else brief(verdict)
        kind = "error" if is_failure(verdict) else "notice"
        yield _command(kind, f"{title}: {CLAUSES[verdict.clause].title}", message)
    for name, own in grouped.items():
        if failures[name]:
            yield _command(
                "notice",
                f"{visible_name(name)}: {outcome(own)}",
                visible(sentence_of(report, name)),
            )


def _command(kind: str, title: str, message: str) -> str:
    title = _escaped(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={title}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
