"""The end of a run of pytest: its report, and the lines that close it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mha.conformance.pytest_plugin.selection import Selection, selection
from mha.conformance.pytest_plugin.stash import REPORT, UNWRITTEN
from mha.conformance.reports.files import save_last, write
from mha.conformance.reports.github import runner_annotations
from mha.conformance.reports.terminal import matrix, needs_plain
from mha.conformance.reports.text import summarise
from mha.conformance.results import Rejections, Report, Verdict
from mha.spec import CLAUSES

ITEM = re.compile(r"::contract\[(.+)-(cpu|cuda)-(\w+)-([A-Z]{3}-\d+)\]$")
COMPLETE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
# In columns; longer lines are hard to read.
WIDEST = 110


def finish(session: pytest.Session, reporter: Any) -> None:
    """Assemble and write the report, also of a run that was stopped, and set the exit status.

    The status is 2 where a report cannot be written, the judge failed, nothing was judged, or a registered
    implementation is broken.
    """
    config, chosen = session.config, selection(session.config)
    verdicts = _verdicts(reporter)
    if verdicts or config.option.mha_report:
        stopped = bool(session.shouldfail or session.shouldstop) or session.exitstatus not in COMPLETE
        report = Report.of_run(
            chosen.settings,
            verdicts,
            targets={name: resolved.target for name, resolved in chosen.implementations.items()},
            started=chosen.started,
            incomplete=stopped,
            broken={entry.name: entry.error for entry in chosen.unavailable if entry.broken},
        )
        unwritten = [why for file in config.option.mha_report if (why := write(report, Path(file)))]
        if verdicts:
            config.stash[REPORT] = report
            save_last(report, config.invocation_params.dir)
        if unwritten:
            config.stash[UNWRITTEN] = [f"mha: {why}" for why in unwritten]
            session.exitstatus = 2
    statuses = {verdict.status for verdict in verdicts}
    broken = any(entry.broken for entry in chosen.unavailable)
    if "harness_error" in statuses or statuses == {"not_claimed"} or broken:
        session.exitstatus = max(2, session.exitstatus)


def summary(chosen: Selection, report: Report, reporter: Any) -> list[str]:
    """Return the lines that end a run: what was judged, the matrix, and the failures."""
    screen = reporter._tw
    encoding = getattr(screen._file, "encoding", None) or "utf-8"
    width = max(60, min(screen.fullwidth, WIDEST))
    drawn = matrix(report.verdicts, width=width, color=screen.hasmarkup, plain=needs_plain(encoding))
    summaries = summarise(report.verdicts, incomplete=report.incomplete)
    return [*chosen.header(), "", *drawn, "", *summaries, *runner_annotations(report.verdicts)]


def _verdicts(reporter: Any) -> list[Verdict]:
    """Return the verdicts that came with the reports of items, from this process or from workers."""
    verdicts = []
    for report in (report for reports in reporter.stats.values() for report in reports):
        carried = [value for name, value in getattr(report, "user_properties", ()) if name == "mha"]
        if carried and getattr(report, "when", None) == "call":
            verdicts += [_from_dict(value) for value in carried]
        unjudged = None if carried or not getattr(report, "failed", False) else ITEM.search(report.nodeid)
        if unjudged:
            verdicts.append(_stopped(report, *unjudged.groups()))
    return verdicts


def _from_dict(data: dict[str, Any]) -> Verdict:
    """Return a verdict from its fields, as they come from a worker."""
    rejections = {name: Rejections(**count) for name, count in data["rejections"].items()}
    return Verdict(**data | {"rejections": rejections})


def _stopped(report: Any, implementation: str, device: str, dtype: str, clause: str) -> Verdict:
    """Return the verdict on an item that did not end: its process crashed, or it ran out of time."""
    crash = getattr(report.longrepr, "reprcrash", None)
    why = " ".join(str(crash.message if crash else report.longrepr).split())[:300]
    return Verdict(
        implementation=implementation,
        clause=clause,
        level=CLAUSES[clause].level,
        dtype=dtype,
        device=device,
        status="fail",
        message=f"judging did not end: {why}",
    )
