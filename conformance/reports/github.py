"""Failures as annotations of GitHub Actions: lines that its runner shows beside a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mha.conformance.reports.report import NONCONFORMING, Verdict
from mha.conformance.reports.text import brief, name_of, visible
from mha.spec import CLAUSES


def annotated(verdicts: Iterable[Verdict]) -> Iterator[str]:
    """Yield a line for each failure; what is only recommended, or waived, is a notice."""
    for verdict in verdicts:
        if verdict.status in (*NONCONFORMING, "waived", "harness_error"):
            kind = "error" if verdict.required and verdict.status != "waived" else "notice"
            told = f"{brief(verdict)} ({visible(verdict.case)})" if verdict.case else brief(verdict)
            title = f"{verdict.clause} {name_of(verdict)} {verdict.dtype}: {CLAUSES[verdict.clause].title}"
            yield f"::{kind} title={_escaped(title).replace(':', '%3A').replace(',', '%2C')}::{_escaped(told)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
