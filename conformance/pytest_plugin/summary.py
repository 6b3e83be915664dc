"""The end of a pytest run: its report, and the lines that are printed last."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from mha.conformance.engine.judge import stopped
from mha.conformance.engine.report import not_covered, report_of_run
from mha.conformance.pytest_plugin.selection import Selection, selection
from mha.conformance.pytest_plugin.stash import JOURNAL, KEPT, REASONS, REPORT, SELECTION, UNWRITTEN
from mha.conformance.reports.files import save_last, write
from mha.conformance.reports.github import runner_annotations, write_step_summary
from mha.conformance.reports.journal import Journal, journal
from mha.conformance.reports.layout import WIDTH
from mha.conformance.reports.merge import by_key, key_of
from mha.conformance.reports.summary import clauses_in
from mha.conformance.reports.terminal import matrix, needs_plain
from mha.conformance.reports.text import (
    brief,
    describe,
    summarise_report,
    visible,
    visible_line,
    visible_name,
)
from mha.conformance.results import Rejections, Report, Verdict
from mha.conformance.settings import Task

ITEM = re.compile(r"::contract\[(.+)-(cpu|cuda)-(\w+)-([A-Z]{3}-\d+)\]$")
COMPLETE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
# In columns; a narrower matrix is hard to read.
NARROWEST = 60


def finish(session: pytest.Session, reporter: Any) -> None:
    """Assemble and write the report, also of an interrupted run, and set the exit status.

    The status is 2 if a report cannot be written, the judge failed, nothing was judged, or a
    registered implementation is broken; the reasons are printed last.
    """
    chosen = selection(session.config)
    verdicts = _verdicts(reporter, chosen)
    report = _report(session, chosen, verdicts)
    _describe_failures(reporter, report)
    if verdicts:
        session.config.stash[REPORT] = report
        unsaved = save_last(report, session.config.invocation_params.dir)
        warnings = filter(None, [write_step_summary(report), unsaved])
        session.config.stash[UNWRITTEN] = [f"mha: {visible_line(warning)}" for warning in warnings]
    files = map(Path, session.config.option.mha_report)
    errors = list(filter(None, [write(report, file) for file in files]))
    reasons = [*errors, *_reasons(report)]
    if reasons:
        session.config.stash[REASONS] = reasons
        is_empty = session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
        session.exitstatus = 2 if errors or is_empty else max(2, session.exitstatus)


class _Keeper:
    """The part of the plugin that keeps verdicts as they are reached."""

    def __init__(self, kept: Journal) -> None:
        self.kept = kept

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a verdict, also one of a worker of pytest-xdist."""
        data = getattr(report, "mha_verdict", None)
        if data:
            self.kept.note(_from_dict(data))


def keep_journal(config: pytest.Config) -> None:
    """Keep the verdicts of a run on disk until it is unconfigured."""
    chosen, stack = config.stash[SELECTION], config.stash.setdefault(JOURNAL, ExitStack())
    kept = config.stash[KEPT] = stack.enter_context(journal(config.invocation_params.dir))
    kept.start(_report_of(chosen, [], incomplete=True))
    config.pluginmanager.register(_Keeper(kept))


def _reasons(report: Report) -> Iterator[str]:
    """Yield why not everything could be judged."""
    failed = [verdict for verdict in report.verdicts if verdict.status == "harness_error"]
    if failed:
        clauses = ", ".join(clauses_in(failed))
        names = ", ".join(dict.fromkeys(visible_name(verdict.implementation) for verdict in failed))
        yield (
            f"the judge or an adapter failed (harness error) on {clauses} of {names}:"
            f" {_end(failed[0])}"
        )
    if {verdict.status for verdict in report.verdicts} == {"not_claimed"}:
        yield f"nothing was judged: {brief(report.verdicts[0])}"
    for name, error in report.broken.items():
        yield (
            f"the registered implementation {visible_name(name)} could not be loaded:"
            f" {visible(error)}"
        )


def _report(session: pytest.Session, chosen: Selection, verdicts: list[Verdict]) -> Report:
    """Return the report of a run; it is incomplete if the run ended early."""
    ended_early = bool(session.shouldfail or session.shouldstop)
    if session.exitstatus not in COMPLETE:
        ended_early = True
    tried = set()
    for report in _reports(session.config.pluginmanager.get_plugin("terminalreporter")):
        if getattr(report, "when", "collect") != "collect":
            tried.add(report.nodeid)
    if len(tried) < session.testscollected:  # pytest-xdist may give up
        ended_early = True
    return _report_of(chosen, verdicts, incomplete=ended_early)


def _report_of(chosen: Selection, verdicts: list[Verdict], *, incomplete: bool) -> Report:
    report = report_of_run(
        chosen.given.of_report(chosen.implementations.values()),
        verdicts,
        targets={name: resolved.target for name, resolved in chosen.implementations.items()},
        started=chosen.started,
        incomplete=incomplete,
        broken=chosen.broken,
    )
    options = not_covered(chosen.implementations.values())
    return replace(report, torch_changes=chosen.torch_changes, not_covered=options)


def _end(verdict: Verdict) -> str:
    """Return the end of a message, which is the error where the message is a traceback."""
    *_, last = ["", *verdict.message.strip().splitlines()]
    return visible(last)


def summary(config: pytest.Config) -> list[str]:
    """Return the lines that end a run: what was judged, the matrix, and the failures."""
    chosen, report = config.stash[SELECTION], config.stash[REPORT]
    terminal = config.get_terminal_writer()
    width = max(NARROWEST, min(terminal.fullwidth, WIDTH))
    plain = needs_plain(sys.stdout.encoding)
    drawn = matrix(report.verdicts, width=width, color=terminal.hasmarkup, plain=plain)
    summaries = summarise_report(report, width)
    return [*runner_annotations(report), *chosen.header(), "", *drawn, "", *summaries]


def _reports(reporter: Any) -> list[Any]:
    """Return what was reported on tests and collectors."""
    return list(chain.from_iterable(reporter.stats.values()))


def _verdicts(reporter: Any, chosen: Selection) -> list[Verdict]:
    """Return the verdicts on the items that were run, here or in workers of pytest-xdist."""
    reports = _reports(reporter)
    carried = {}
    for report in reports:
        if hasattr(report, "mha_verdict"):
            carried[report.nodeid] = report.mha_verdict
    verdicts = list(map(_from_dict, carried.values()))
    for report in reports:
        if not getattr(report, "failed", False) or report.nodeid in carried:
            continue
        item = ITEM.search(report.nodeid)
        if item:
            name, device, dtype, clause = item.groups()
            resolved, settings = chosen.implementations[name], chosen.settings[name]
            task = Task(clause, dtype, device)
            verdicts.append(stopped(resolved, task, settings, _reason(report)))
    return verdicts


class _Failure:
    """What pytest prints about a failure: everything below FAILURES, and a line in its summary."""

    def __init__(self, verdict: Verdict) -> None:
        self.text = describe(verdict)
        self.reprcrash = _Line(brief(verdict))

    def toterminal(self, writer: Any) -> None:
        """Print everything."""
        writer.line(self.text)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class _Line:
    message: str

    def __str__(self) -> str:
        return self.message


def _describe_failures(reporter: Any, report: Report) -> None:
    """Set what pytest prints about each failure, now that it is known what explains others."""
    verdicts = by_key(report)
    for failed in reporter.stats.get("failed", ()):
        carried = getattr(failed, "mha_verdict", None)
        if carried:
            failed.longrepr = _Failure(verdicts[key_of(_from_dict(carried))])


def _from_dict(data: dict[str, Any]) -> Verdict:
    """Return a verdict from its fields, as an item reports them."""
    rejections = {name: Rejections(**count) for name, count in data["rejections"].items()}
    return Verdict(**data | {"rejections": rejections})


def _reason(report: Any) -> str:
    """Return why an item did not end: its process crashed, or it ran out of time."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join(str(crash.message if crash else report.longrepr).split())[:300]
