"""Failures as annotations of GitHub Actions: lines that its runner shows beside a pull request."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from mha.conformance.reports.text import brief, shown, visible
from mha.conformance.results import NONCONFORMING, Verdict
from mha.spec import CLAUSES


def marks(verdicts: Iterable[Verdict]) -> list[str]:
    """Return the annotations where the run is one of GitHub Actions."""
    return list(annotated(verdicts)) if os.environ.get("GITHUB_ACTIONS") == "true" else []


def annotated(verdicts: Iterable[Verdict]) -> Iterator[str]:
    """Yield a line for each failure; what is only recommended, or waived, is a notice."""
    for verdict in verdicts:
        if verdict.status in (*NONCONFORMING, "waived", "harness_error"):
            spared = verdict.status == "waived" or (verdict.conforms and verdict.status != "harness_error")
            kind = "notice" if spared else "error"
            told = f"{brief(verdict)} ({visible(verdict.case)})" if verdict.case else brief(verdict)
            title = f"{verdict.clause} {shown(verdict.implementation)} {verdict.dtype}: {CLAUSES[verdict.clause].title}"
            yield f"::{kind} title={_escaped(title).replace(':', '%3A').replace(',', '%2C')}::{_escaped(told)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
