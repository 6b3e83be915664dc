"""`mha report`: reports shown, rendered, merged and compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mha.conformance.reports.changes import write_changes
from mha.conformance.reports.compare import Comparison, describe_changes
from mha.conformance.reports.files import read, validate_file, write
from mha.conformance.reports.layout import width_of
from mha.conformance.reports.merge import merge
from mha.conformance.reports.terminal import matrix, needs_plain
from mha.conformance.reports.text import summarise_report, visible_name
from mha.conformance.results import Report


def report_lines(
    files: Sequence[Path], *, merge_all: bool, to: Sequence[Path], schema: bool
) -> tuple[list[str], int]:
    """Return the lines to print and the exit status, and write the files that were asked for.

    files: one report is shown or rendered; several are merged with `merge_all`, and two are
        compared without it.
    to: where the report, or the comparison, is written.
    schema: print the JSON schema of a report instead.
    Raises ValueError for other combinations, and for a file that cannot be read or written.
    """
    if schema:
        return [json.dumps(Report.schema(), indent=2)], 0
    _validate(files, to, merge_all=merge_all)
    reports = [read(file) for file in files]
    if len(reports) == 2 and not merge_all:
        comparison = Comparison(*reports)
        written = wrote(to, [write_changes(comparison, file) for file in to])
        return [*describe_changes(comparison), *written], comparison.exit_status
    report = merge(reports)
    if to:
        return wrote(to, [write(report, file) for file in to]), 0
    return show_report(report), report.exit_status


def _validate(files: Sequence[Path], to: Sequence[Path], *, merge_all: bool) -> None:
    if len(files) > 2 and not merge_all:
        hint = "add --merge if they are the shards of one run"
        raise ValueError(f"only two reports can be compared, but {len(files)} are given; {hint}")
    for file in to:
        validate_file(file, "--to")


def wrote(files: Sequence[Path], errors: Sequence[str]) -> list[str]:
    """Return a line for each file; raise ValueError for the first that could not be written."""
    for error in filter(None, errors):
        raise ValueError(error)
    return [f"wrote {file}" for file in files]


def show_report(report: Report) -> list[str]:
    """Return a report as lines for the terminal, with colours where it has them."""
    width, plain = width_of(sys.stdout), needs_plain(sys.stdout.encoding)
    color = sys.stdout.isatty()
    lines: list[str] = []
    if report.verdicts:
        lines += matrix(report.verdicts, width=width, color=color, plain=plain)
    lines += ["", *summarise_report(report, width)]
    if report.since:
        earliest, latest = visible_name(report.since), visible_name(report.started)
        since = f"Some verdicts are of {earliest}, others of runs up to {latest}"
        lines += ["", f"{since}: judge again after changes."]
    return lines
