"""`mha replay`: one case, or the failures of a report, run again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mha.conformance.cases.parsing import read_case
from mha.conformance.cli.printing import print_folded
from mha.conformance.engine.replay import Outcome, failures, one_of, replay_case, replay_verdicts
from mha.conformance.reports.files import LAST, read
from mha.conformance.reports.text import subject, visible_line, visible_name
from mha.conformance.results import Report, this_host
from mha.conformance.settings import validate_devices
from mha.conformance.sharding.gathered import refused_ranks


def replay_what(what: str, clauses: Sequence[str], target: str) -> Iterator[tuple[Outcome, str]]:
    """Run a case, or the failures of a report, again; yield each outcome, with the line to print.

    what: a case as its repr writes it, or the file of a report. clauses: all if empty. target: the
    implementation to run; that of the report if empty. Raises ValueError for input that cannot be
    replayed.
    """
    if what.lstrip().startswith("Case("):
        yield _replayed_case(what, clauses, target)
        return
    report = read(Path(what))
    chosen = failures(report, clauses)
    if not chosen:
        of_clauses = f" of {', '.join(clauses)}" if clauses else ""
        raise ValueError(f"nothing to replay: {what!r} has no failure{of_clauses}")
    if not target and not _is_of_here(Path(what), report):
        _announce(what, [report.targets.get(verdict.implementation, "") for verdict in chosen])
    for verdict, (outcome, message) in replay_verdicts(report, chosen, target):
        text = message or verdict.case or ""
        yield outcome, _line(outcome, verdict.clause, subject(verdict), text)


def _is_of_here(file: Path, report: Report) -> bool:
    """Return whether a report is of the last run in this folder, on a machine like this one."""
    last = Path().resolve() / LAST
    return file.absolute() == last and file.resolve() == last and report.host == this_host()


def _announce(what: str, targets: Sequence[str]) -> None:
    """Say what is about to be imported since a report names it: importing runs code."""
    for target in dict.fromkeys(filter(None, targets)):
        print_folded(visible_line(f"{what} names {target}; it is imported and run now"), err=True)


def _replayed_case(text: str, clauses: Sequence[str], target: str) -> tuple[Outcome, str]:
    if len(clauses) != 1 or not target:
        raise ValueError(
            "a case needs the clause and the implementation to check it on: add --clause and --impl"
        )
    case, implementation = read_case(text), one_of(target)
    validate_devices([case.device])
    refused = refused_ranks(implementation, case.ranks) if case.ranks else ""
    if refused:
        raise ValueError(refused)
    outcome, message = replay_case(implementation, clauses[0], case)
    return outcome, _line(outcome, clauses[0], visible_name(implementation.name), message or text)


def _line(outcome: Outcome, clause: str, subject: str, message: str) -> str:
    return f"{outcome:12} {clause:7} {subject}: {visible_line(message)}"
