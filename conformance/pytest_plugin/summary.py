"""What a run of pytest found: the verdicts of its items as a report, and the lines that end it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mha.conformance.engine.judge import versions
from mha.conformance.pytest_plugin.items import Selection
from mha.conformance.reports.github import marks
from mha.conformance.reports.terminal import matrix, needs_plain
from mha.conformance.reports.text import summarise
from mha.conformance.results import Report, Verdict, host
from mha.spec import CLAUSES


def stopped(report: Any, implementation: str, device: str, dtype: str, clause: str) -> dict[str, Any]:
    """Return the verdict on an item that came to no end: a crash of its process, or a time limit."""
    crash = getattr(report.longrepr, "reprcrash", None)
    told = " ".join(str(crash.message if crash else report.longrepr).split())[:300]
    verdict = Verdict(
        implementation=implementation,
        clause=clause,
        level=CLAUSES[clause].level,
        dtype=dtype,
        device=device,
        status="fail",
        message=f"it was not judged to the end: {told}",
    )
    return asdict(verdict)


def summary(chosen: Selection, report: Report, *, width: int, color: bool, encoding: str) -> list[str]:
    """Return the lines that end a run: what was judged, the matrix, and what departs."""
    drawn = matrix(report.verdicts, width=width, color=color, plain=needs_plain(encoding))
    told = summarise(report.verdicts, incomplete=report.incomplete)
    return [*chosen.header(), "", *drawn, "", *told, *marks(report.verdicts)]


def report_of(chosen: Selection, verdicts: list[dict[str, Any]], *, incomplete: bool) -> Report:
    """Return the report of a run, in the order of the selection and of the contract."""
    names = [implementation.name for implementation in chosen.implementations]
    clauses = list(CLAUSES)

    def place(verdict: Verdict) -> tuple[int, ...]:
        where = chosen.devices.index(verdict.device), chosen.dtypes.index(verdict.dtype)
        return names.index(verdict.implementation), *where, clauses.index(verdict.clause)

    return Report(
        verdicts=tuple(sorted((Verdict(**verdict) for verdict in verdicts), key=place)),
        profile=chosen.profile,
        seed=chosen.seed,
        versions=versions(),
        targets=dict(chosen.targets),
        strict=chosen.strict,
        incomplete=incomplete,
        broken={entry.name: entry.error for entry in chosen.unavailable if entry.broken},
        started=chosen.started,
        host=host(),
    )
