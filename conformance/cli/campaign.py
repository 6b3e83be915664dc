"""`mha campaign`: a plan run job by job, and its results shown as one report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mha.conformance.campaign.folder import Folder, Result
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
from mha.conformance.cli.report import show_report, wrote
from mha.conformance.reports.compare import Comparison, describe_changes
from mha.conformance.reports.files import validate_file
from mha.conformance.reports.layout import INDENT
from mha.conformance.reports.summary import is_failure
from mha.conformance.reports.text import brief, in_columns, subject, visible_line, visible_name
from mha.conformance.results import Report, Verdict, status_of


def run_plan(file: Path, out: Path, options: RunOptions) -> int:
    """Run a plan, with a line for each failure that is found; return the exit status.

    That is 2 where the run was stopped, and where a registered implementation that "all" names is
    broken. Raises ValueError, in one line, for a plan, a folder or options that cannot be used.
    """
    campaign = Campaign.of(read_plan(file))
    print_unjudged(campaign)
    state, begun, interrupted = RunState(), monotonic(), False
    try:
        with closing(run_campaign(campaign, Folder(out), options, state)) as results:
            _print_failures(results, state)
    except KeyboardInterrupt:
        interrupted = True
    for place in state.corrupt:
        print_folded(f"corrupt, run again: {visible_line(place)}")
    print_folded(f"settings: {_described(campaign)}")
    print_folded(_outcome(state, monotonic() - begun, options))
    if interrupted:
        print_folded("INCOMPLETE: the run was stopped; what is done is kept: go on with --resume.")
    return 2 if interrupted or campaign.broken else 0


def _print_failures(results: Iterable[Result], state: RunState) -> None:
    """Print a line for each failure, below a progress bar; one of several seeds is printed once."""
    columns = (
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
    )
    console = Console(highlight=False)
    known: set[tuple[str, str]] = set()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("jobs", total=None)
        for result in results:
            bar.update(task, total=state.total - state.earlier, completed=state.done)
            for verdict in filter(is_failure, result.report.verdicts):
                # What a failure says that another one may say too.
                finding = verdict.diagnosis or f"{status_of(verdict)} {verdict.clause}"
                if (verdict.implementation, finding) not in known:
                    known.add((verdict.implementation, finding))
                    line = _line(verdict, result.report.seed)
                    console.print(line, markup=False, soft_wrap=True)


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


def _described(campaign: Campaign) -> str:
    """Return how implementations are judged, and those for which pyproject.toml says more."""
    whole = str(campaign.settings)
    facts = [whole]
    for name, resolved in campaign.resolved.items():
        own = str(campaign.settings.of_target(resolved))
        if own != whole:
            facts.append(f"{name}: {own}")
    return visible_line("; ".join(facts))


def _line(verdict: Verdict, seed: int) -> str:
    text = f"{subject(verdict)}, seed {seed}: {brief(verdict)}"
    return in_columns(status_of(verdict), verdict.clause, text)


def _outcome(state: RunState, seconds: float, options: RunOptions) -> str:
    """Return how many jobs are done, and why clauses ended early."""
    jobs = f"{state.total} jobs"
    if options.shard.of > 1:
        jobs += f" of shard {options.shard.number}/{options.shard.of}"
    done = state.done + state.earlier
    parts = [f"{done} of {jobs} are done, {state.done} of them in {seconds:.0f} s"]
    for why, number in state.stops.items():
        parts.append(f"{number} clauses ended early: {visible_line(why)}")
    return "; ".join(parts)


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
    lines = wrote(to, [write_campaign(report, jobs, file) for file in to])
    if kept:
        lines.append(kept)
    if before:
        comparison = Comparison(campaign_report([Folder(before)])[0], report)
        return [*describe_changes(comparison), "", *lines], comparison.exit_status
    return [*_shown(report, jobs), "", *lines], report.exit_status


def _shown(report: Report, jobs: Jobs) -> list[str]:
    """Return the report as that of one run, what came of the jobs, and the table of failures."""
    lines = [*show_report(report), "", *jobs.lines(report)]
    for clause, status, cause, names, dtypes, seeds, case in rows(report):
        lines += [
            "",
            in_columns(status, clause, cause),
            f"{INDENT}{names}; {dtypes}; seeds: {seeds}",
            f"{INDENT}{case}",
        ]
    return lines
