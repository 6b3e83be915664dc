"""`mha check`: judge a few implementations, and tell each departure as it is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from mha.conformance.engine.judge import judge_all
from mha.conformance.reports.files import save_last, validate_file, write
from mha.conformance.reports.github import runner_annotations
from mha.conformance.reports.summary import status_of
from mha.conformance.reports.terminal import matrix, needs_plain
from mha.conformance.reports.text import brief, describe, summarise, visible_name
from mha.conformance.results import Report, Verdict, now
from mha.conformance.settings import Settings, by_name
from mha.conformance.waivers import read_waivers
from mha.implementations import Resolved, resolve

WIDTH = 110
QUIET = ("pass", "not_claimed", "blocked")


def check_all(
    targets: Sequence[str], settings: Settings, *, waivers: Path | None = None, reports: Sequence[Path] = ()
) -> int:
    """Judge all targets, printing each failure as it is found, and return the exit status.

    An interrupted run is reported as far as it got. Raises ValueError, before anything is judged, for a target, a
    waiver file or a report file that cannot be used.
    """
    for file in reports:
        validate_file(file, "--report")
    chosen = by_name(resolved for target in targets for resolved in resolve(target))
    if waivers:
        settings = replace(settings, waivers=tuple(read_waivers(waivers, chosen)))
    console, started = Console(highlight=False), now()
    verdicts: list[Verdict] = []
    stopped = False
    try:
        for resolved in chosen.values():
            announce(console, resolved)
            judge_one(console, resolved, settings, verdicts)
    except KeyboardInterrupt:
        stopped = True
        say(console, "\nINCOMPLETE: the run was stopped.")
    report = Report.of_run(
        settings,
        verdicts,
        targets={name: resolved.target for name, resolved in chosen.items()},
        started=started,
        incomplete=stopped,
    )
    return finish(console, report, reports)


def judge_one(console: Console, resolved: Resolved, settings: Settings, verdicts: list[Verdict]) -> None:
    """Judge one implementation, adding to the verdicts as they come."""
    own: list[Verdict] = []
    ahead = [*settings.judged_clauses * (len(settings.dtypes) * len(settings.devices)), ""]
    with progress_bar(console, ahead) as bar:
        for verdict in judge_all(resolved, settings):
            own.append(verdict)
            verdicts.append(verdict)
            show(bar, own, ahead[len(own)])
            if verdict.status not in QUIET:
                say(bar.console, describe(verdict) + "\n" if settings.clauses else line(verdict))
    first, *_, last = summarise(own)
    say(console, f"\n{first}\n{last}")
    scripted = [verdict for verdict in own if verdict.script]
    if scripted and not settings.clauses:
        clause = min(scripted, key=lambda verdict: verdict.conforms).clause
        say(console, f"For a failure in full, with a script that reproduces it: add --clause {clause}")


def finish(console: Console, report: Report, files: Sequence[Path]) -> int:
    """Write the reports, print what concerns the whole run, and return the exit status."""
    unwritten = [why for file in files if (why := write(report, file))]
    save_last(report, Path())
    if len(report.by_implementation) > 1:
        plain, width = needs_plain(console.encoding), min(console.width, WIDTH)
        drawn = matrix(report.verdicts, width=width, color=console.is_terminal, plain=plain)
        console.print(Text.from_ansi("\n".join(["", *drawn])), soft_wrap=True)
    for text in (*runner_annotations(report.verdicts), *(f"mha: {why}" for why in unwritten)):
        say(console, text)
    return 2 if unwritten else report.exit_status


def announce(console: Console, resolved: Resolved) -> None:
    """Say what is judged, and what was inferred of it."""
    inference = resolved.inference
    say(console, visible_name(resolved.implementation.name) + (", as it was understood:\n" if inference else "\n"))
    if inference:
        say(console, "\n".join([*inference.lines, ""]))


def say(console: Console, text: str) -> None:
    """Print a text as it is: nothing in it is markup, and no line is broken."""
    console.print(Text(text), soft_wrap=True)


def progress_bar(console: Console, clauses: Sequence[str]) -> Progress:
    """Return a bar that shows where the run is, on a terminal, and leaves nothing behind."""
    columns = (TextColumn("{task.description:7}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"))
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    bar.add_task(clauses[0], total=len(clauses) - 1, told="")
    return bar


def show(bar: Progress, own: Sequence[Verdict], clause: str) -> None:
    """Move the bar to the clause at hand."""
    cases, failing = sum(verdict.examples for verdict in own), sum(not verdict.conforms for verdict in own)
    told = f"{cases} cases, {failing} not kept"
    bar.update(bar.task_ids[0], completed=len(own), description=clause, told=told)


def line(verdict: Verdict) -> str:
    """Return a departure in a line or two."""
    first = f"{status_of(verdict):15} {verdict.clause:7} {verdict.dtype}: "
    return fill(first + brief(verdict), WIDTH, subsequent_indent=" " * 24, break_long_words=False)
