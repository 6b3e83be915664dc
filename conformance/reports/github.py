"""Failures as annotations of GitHub Actions, which its runner shows beside a pull request."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from mha.conformance.reports.summary import is_failure
from mha.conformance.reports.text import LISTED, brief, visible, visible_name
from mha.conformance.results import Verdict
from mha.spec.clauses import CLAUSES


def runner_annotations(verdicts: Iterable[Verdict]) -> list[str]:
    """Return the annotations, or none where this is not a run of GitHub Actions."""
    return list(workflow_commands(verdicts)) if os.environ.get("GITHUB_ACTIONS") == "true" else []


def workflow_commands(verdicts: Iterable[Verdict]) -> Iterator[str]:
    """Yield a workflow command for each failure: an error, or a notice if it is waived or an unmet SHOULD."""
    for verdict in verdicts:
        if verdict.status in LISTED:
            kind = "error" if is_failure(verdict) else "notice"
            title = f"{verdict.clause} {visible_name(verdict.implementation)} {verdict.dtype}"
            title = _escaped(f"{title}: {CLAUSES[verdict.clause].title}").replace(":", "%3A").replace(",", "%2C")
            message = f"{brief(verdict)} ({visible(verdict.case)})" if verdict.case else brief(verdict)
            yield f"::{kind} title={title}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
