"""The report of a campaign: its results merged, and what is to be said of its jobs."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from mha.conformance.campaign.folder import (
    CorruptError,
    Folder,
    Result,
    Stamp,
    changed_since,
    named,
    results_in_words,
)
from mha.conformance.engine.replay import failures
from mha.conformance.reports.files import render, write
from mha.conformance.reports.html import Section, to_html
from mha.conformance.reports.markdown import to_markdown
from mha.conformance.reports.merge import merge
from mha.conformance.reports.summary import is_failure, severity
from mha.conformance.reports.text import brief, visible_line, visible_name
from mha.conformance.reports.writing import write_own, write_text
from mha.conformance.results import Report, Verdict, status_of
from mha.conformance.shown import markdown_line

# The failing cases, in the folder of the campaign.
FAILURES = "failures.json"
COLUMNS = (
    "clause",
    "status",
    "diagnosis or message",
    "implementations",
    "dtypes",
    "seeds",
    "smallest case",
)


@dataclass
class Jobs:
    """What came of the jobs.

    stops, retried: by the reason, jobs that ended early, and jobs that did so at first.
    corrupt: results that could not be read.
    flaky: jobs that two runs judged differently.
    outdated: what is said of results that are not of this campaign, or not of the files that are
        there now.
    by_target: the jobs that are done.
    """

    total: int = 0
    done: int = 0
    stops: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    corrupt: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)
    outdated: list[str] = field(default_factory=list)
    by_target: Counter[str] = field(default_factory=Counter)

    def lines(self, report: Report) -> Iterator[str]:
        """Yield what is said of them, in lines."""
        cases = sum(verdict.examples for verdict in report.verdicts)
        took = sum(verdict.seconds for verdict in report.verdicts)
        yield (
            f"{self.done} of {self.total} jobs, {len(report.all_seeds)} seeds, {cases} cases,"
            f" {took:.0f} s of judging"
        )
        for why, count in self.stops.items():
            yield f"ended early: {count} clauses: {visible_line(why)}"
        for why, count in self.retried.items():
            yield f"ended early at first, and run again: {count}: {visible_line(why)}"
        for place in self.corrupt:
            yield f"corrupt, to be run again: {visible_line(place)}"
        for what in self.flaky:
            yield f"not repeatable: {visible_line(what)}"
        yield from map(visible_line, self.outdated)


def campaign_report(folders: Sequence[Folder]) -> tuple[Report, Jobs]:
    """Return the report of a campaign whose results are in some folders, and what came of its jobs.

    A job that has two results with different verdicts is a fault of the judge: a harness error.
    Raises ValueError for a folder that is not of a campaign, and for folders of different ones.
    """
    stamp = folders[0].stamp()
    for other in folders[1:]:
        if other.stamp() != stamp:
            raise ValueError(
                f"{str(folders[0].path)!r} and {str(other.path)!r} are of different campaigns"
            )
    jobs = Jobs(total=len(stamp.keys))
    reports = _reports(stamp, folders, jobs)
    first = next(reports, None)
    if first is None:
        raise ValueError(f"{str(folders[0].path)!r} has no results yet")
    report = merge(chain([first], reports), across_seeds=True)
    jobs.outdated = [*_outdated(stamp, jobs), *_left_out(stamp, folders)]
    report = replace(
        report,
        versions=dict(stamp.versions),
        incomplete=jobs.done < jobs.total,
        broken=dict(stamp.broken),
    )
    return report, jobs


def _outdated(stamp: Stamp, jobs: Jobs) -> Iterator[str]:
    """Yield how many results are of files that have changed since, for each target."""
    for target, files in changed_since(stamp).items():
        count = jobs.by_target[target]
        if count:
            yield f"{results_in_words(count)} of an earlier version of {named(files)} ({target})"


def _left_out(stamp: Stamp, folders: Sequence[Folder]) -> Iterator[str]:
    """Yield how many results are of no job of the campaign, as where they were copied into it."""
    keys = frozenset(stamp.keys)
    for folder in folders:
        count = sum(key not in keys for key in folder.result_keys())
        if count:
            where = str(folder.path)
            yield (
                f"{results_in_words(count)} of an earlier version or of another plan, and left out:"
                f" {where!r}"
            )


def _reports(stamp: Stamp, folders: Sequence[Folder], jobs: Jobs) -> Iterator[Report]:
    """Yield the report of each job that has a result, and count the jobs."""
    for key in stamp.keys:
        found = list(_results(key, folders, jobs))
        if not found:
            continue
        jobs.done += 1
        result = min(found, key=lambda each: len(each.stops))
        jobs.by_target.update(result.report.targets.values())
        jobs.stops.update(result.stops.values())
        jobs.retried.update(result.retried.values())
        others = [each for each in found if not each.stops and each is not result]
        yield _agreed(result.report, [each.report for each in others], jobs)


def _results(key: str, folders: Sequence[Folder], jobs: Jobs) -> Iterator[Result]:
    """Yield the results of a job that can be read."""
    for folder in folders:
        try:
            result = folder.get(key)
        except CorruptError as error:
            jobs.corrupt.append(str(error))
            continue
        if result:
            yield result


def _agreed(report: Report, others: Sequence[Report], jobs: Jobs) -> Report:
    """Return the report of a job, with a harness error for what another run of it contradicts."""
    theirs: dict[str, list[Verdict]] = {}
    for verdict in chain.from_iterable(other.verdicts for other in others):
        theirs.setdefault(verdict.clause, []).append(verdict)
    verdicts = list(report.verdicts)
    for number, verdict in enumerate(verdicts):
        for other in theirs.get(verdict.clause, ()):
            if replace(other, seconds=verdict.seconds) == verdict:
                continue
            statuses = f"{status_of(verdict)} in one run of this job and {status_of(other)}"
            what = f"{statuses} in another"
            about = f"{verdict.clause} for {verdict.implementation}, seed {report.seed}"
            jobs.flaky.append(f"{about}: {what}")
            verdicts[number] = replace(
                verdict, status="harness_error", message=f"not repeatable: {what}"
            )
    return replace(report, verdicts=tuple(verdicts))


def groups(report: Report) -> list[list[Verdict]]:
    """Return the failures of all implementations by clause and diagnosis, the most severe first."""
    grouped: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in sorted(filter(is_failure, report.verdicts), key=severity):
        if verdict.status != "blocked":
            key = (verdict.clause, verdict.status, verdict.diagnosis)
            grouped.setdefault(key, []).append(verdict)
    return list(grouped.values())


def rows(report: Report) -> list[tuple[str, ...]]:
    """Return the rows of the table of failures, as in `COLUMNS`."""
    return [_row(report, same) for same in groups(report)]


def _row(report: Report, same: Sequence[Verdict]) -> tuple[str, ...]:
    """Return the row of failures that are about the same; of the smallest case, if any has one."""
    smallest = min(same, key=lambda verdict: (not verdict.case, len(verdict.case or "")))
    first = (smallest.seeds or report.all_seeds)[0]
    seeds: set[int] = set()
    for verdict in same:
        seeds.update(verdict.seeds or report.all_seeds)
    names = dict.fromkeys(visible_name(verdict.implementation) for verdict in same)
    dtypes = dict.fromkeys(visible_name(verdict.dtype) for verdict in same)
    return (
        smallest.clause,
        status_of(smallest),
        visible_line(smallest.diagnosis) or brief(smallest),
        ", ".join(names),
        ", ".join(dtypes),
        f"{len(seeds)} of {len(report.all_seeds)}, first {first}",
        visible_line(smallest.case or ""),
    )


def write_campaign(report: Report, jobs: Jobs, file: Path) -> str:
    """Write the report in the format of the file's suffix; return an error message, or ""."""
    if file.suffix == ".json":
        return write(report, file)
    text = _page(report, jobs) if file.suffix == ".html" else _markdown(report, jobs)
    try:
        write_text(file, text)
    except OSError as error:
        return f"the report cannot be written to {str(file)!r}: {error.strerror}"
    return ""


def _page(report: Report, jobs: Jobs) -> str:
    """Return the page of the report, with a section on the campaign."""
    body = "".join(f"<p>{html.escape(line)}</p>" for line in jobs.lines(report))
    table = rows(report)
    if table:
        lines = [_html_row(COLUMNS, "th"), *(_html_row(row, "td") for row in table)]
        body += f"<table>{''.join(lines)}</table>"
    return to_html(report, [Section("Campaign", "campaign", body)])


def _html_row(cells: Sequence[str], element: str) -> str:
    row = "".join(f"<{element}>{html.escape(cell)}</{element}>" for cell in cells)
    return f"<tr>{row}</tr>"


def _markdown(report: Report, jobs: Jobs) -> str:
    """Return the report as Markdown, with a section on the campaign."""
    lines = [f"- {markdown_line(line)}" for line in jobs.lines(report)]
    table = rows(report)
    if table:
        lines += ["", _table_row(COLUMNS), _table_row(("---",) * len(COLUMNS))]
    for row in table:
        lines.append(_table_row(list(map(markdown_line, row))))
    return "\n".join([to_markdown(report), "", "### Campaign", "", *lines, ""])


def _table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def keep_failures(report: Report, folder: Folder) -> str:
    """Write the failures that have a case into the folder; return what to print, or ""."""
    file = folder.path / FAILURES
    failing = failures(report)
    if not failing and not file.exists():
        return ""
    kept = replace(report, verdicts=tuple(failing), incomplete=False)
    try:
        write_own(file, render(kept, file.suffix))
    except OSError as error:
        return f"mha: the failing cases cannot be written to {str(file)!r}: {error.strerror}"
    return f"wrote {file}: the failing cases, for mha replay"
