"""`mha replay`: failures of a report, or one case, run again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mha.conformance.cases.parsing import read_case
from mha.conformance.engine.replay import Outcome, failures, one_of, replay_case, replay_verdicts
from mha.conformance.reports.files import read
from mha.conformance.reports.text import subject, visible, visible_name
from mha.conformance.settings import validate_devices


def replay_what(what: str, clauses: Sequence[str], target: str) -> Iterator[tuple[Outcome, str]]:
    """Run a case, or the failures of a report, again; yield the outcome of each, and a line that reports it.

    what: a case as its repr writes it, or the name of a report. Raises ValueError for what cannot be replayed.
    """
    if what.lstrip().startswith("Case("):
        if len(clauses) != 1 or not target:
            raise ValueError("a case alone does not say what it violates: add --clause and --impl")
        case, implementation = read_case(what), one_of(target)
        validate_devices([case.device])
        outcome, message = replay_case(implementation, clauses[0], case)
        yield outcome, f"{outcome:7} {clauses[0]:7} {visible_name(implementation.name)}: {message or what}"
        return
    report = read(Path(what))
    chosen = failures(report, clauses)
    if not chosen:
        raise ValueError(f"nothing to replay: {what!r} has no failure{' of ' + ', '.join(clauses) if clauses else ''}")
    for verdict, (outcome, message) in replay_verdicts(report, chosen, target):
        yield outcome, f"{outcome:7} {verdict.clause:7} {subject(verdict)}: {visible(message or verdict.case or '')}"
