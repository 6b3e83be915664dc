"""What `mha campaign run` and `mha campaign report` do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mha.conformance.campaign.folder import Folder
from mha.conformance.campaign.plan import Campaign, read_plan
from mha.conformance.campaign.report import (
    Jobs,
    campaign_report,
    keep_failures,
    rows,
    write_campaign,
)
from mha.conformance.campaign.run import RunOptions, RunState, run_campaign
from mha.conformance.cli.printing import print_folded
from mha.conformance.cli.report import show_report
from mha.conformance.reports.compare import Comparison, describe_changes
from mha.conformance.reports.files import validate_file
from mha.conformance.reports.layout import INDENT
from mha.conformance.reports.summary import is_failure
from mha.conformance.reports.text import brief, in_columns, subject, visible_line, visible_name
from mha.conformance.results import Report, Verdict, status_of


def run_plan(file: Path, out: Path, options: RunOptions) -> int:
    """Run a plan, with a line for each failure that is found, for the first seed only; return the
    exit status.

    That is 2 where the run was stopped, and where a registered implementation that "all" names is
    broken. Raises ValueError, in one line, for a plan, a folder or options that cannot be used.
    """
    campaign = Campaign.of(read_plan(file))
    print_unjudged(campaign)
    state, begun, interrupted = RunState(), monotonic(), False
    columns = (
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
    )
    console, known = Console(highlight=False), set[tuple[str, str]]()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("jobs", total=None)
        try:
            with closing(run_campaign(campaign, Folder(out), options, state)) as results:
                for result in results:
                    bar.update(task, total=state.total - state.earlier, completed=state.done)
                    for verdict in filter(is_failure, result.report.verdicts):
                        if (found := (verdict.implementation, _finding(verdict))) not in known:
                            known.add(found)
                            console.print(
                                _line(verdict, result.report.seed), markup=False, soft_wrap=True
                            )
        except KeyboardInterrupt:
            interrupted = True
    for place in state.corrupt:
        print_folded(f"corrupt, run again: {visible_line(place)}")
    print_folded(f"settings: {_described(campaign)}")
    print_folded(_outcome(state, monotonic() - begun, options))
    if interrupted:
        print_folded("INCOMPLETE: the run was stopped; what is done is kept: go on with --resume.")
    return 2 if interrupted or campaign.broken else 0


def print_unjudged(campaign: Campaign) -> None:
    """Print what nothing is judged of, and why."""
    for name in campaign.without_jobs:
        print_folded(
            f"{visible_name(name)} claims none of these dtypes and devices: nothing of it is judged"
        )
    for name, error in campaign.broken.items():
        print_folded(
            f"{visible_name(name)} cannot be loaded, so not everything is judged:"
            f" {visible_line(error)}"
        )
    for name, error in campaign.missing.items():
        print_folded(f"{visible_name(name)} is not available: {visible_line(error)}")


def _finding(verdict: Verdict) -> str:
    """Return what a failure says that another one may say too."""
    return verdict.diagnosis or f"{status_of(verdict)} {verdict.clause}"


def _described(campaign: Campaign) -> str:
    """Return how the implementations are judged, and where a table of pyproject.toml says more
    about one.
    """
    whole = str(campaign.settings)
    own = {name: str(campaign.settings.of_target(each)) for name, each in campaign.resolved.items()}
    facts = [whole, *(f"{name}: {text}" for name, text in own.items() if text != whole)]
    return visible_line("; ".join(facts))


def _line(verdict: Verdict, seed: int) -> str:
    text = f"{subject(verdict)}, seed {seed}: {brief(verdict)}"
    return in_columns(status_of(verdict), verdict.clause, text)


def _outcome(state: RunState, seconds: float, options: RunOptions) -> str:
    ended = (
        f"{count} clauses ended early: {visible_line(why)}" for why, count in state.stops.items()
    )
    stops = "; ".join(ended)
    shard = f" of shard {options.shard.number}/{options.shard.of}" if options.shard.of > 1 else ""
    done = state.done + state.earlier
    text = f"{done} of {state.total} jobs{shard} are done, {state.done} of them in {seconds:.0f} s"
    return f"{text}; {stops}" if stops else text


def report_lines(
    folders: Sequence[Path], before: Path | None, to: Sequence[Path]
) -> tuple[list[str], int]:
    """Return the lines to print and the exit status, and write the files that were asked for.

    Raises ValueError, in one line, for a folder or file that cannot be used.
    """
    for file in to:
        validate_file(file, "--to")
    report, jobs = campaign_report([Folder(folder) for folder in folders])
    kept = keep_failures(report, Folder(folders[0]))
    if errors := [error for file in to if (error := write_campaign(report, jobs, file))]:
        raise ValueError(errors[0])
    lines = [*(f"wrote {file}" for file in to), *([kept] if kept else [])]
    if before:
        comparison = Comparison(campaign_report([Folder(before)])[0], report)
        return [*describe_changes(comparison), "", *lines], comparison.exit_status
    return [*_shown(report, jobs), "", *lines], report.exit_status


def _shown(report: Report, jobs: Jobs) -> list[str]:
    lines = [*show_report(report), "", *jobs.lines(report)]
    for clause, status, cause, names, dtypes, seeds, case in rows(report):
        lines += [
            "",
            in_columns(status, clause, cause),
            f"{INDENT}{names}; {dtypes}; seeds: {seeds}",
            f"{INDENT}{case}",
        ]
    return lines
