"""`mha report`: reports shown, converted, merged and compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mha.conformance.reports.compare import differences, merged
from mha.conformance.reports.files import read, validate_file, write
from mha.conformance.reports.terminal import matrix, needs_plain
from mha.conformance.reports.text import summarise
from mha.conformance.results import Report


def report_on(files: Sequence[Path], *, merge: bool, to: Sequence[Path], schema: bool) -> tuple[list[str], int]:
    """Return the lines to print and the exit status; write the files of `to`.

    One report is shown, two are compared, and any number are merged if `merge` is set. Raises ValueError for another
    combination, and for a file that cannot be read or written.
    """
    if schema:
        return [json.dumps(Report.schema(), indent=2)], 0
    _validate(files, merge=merge, to=to)
    reports = [read(file) for file in files]
    if len(reports) == 2 and not merge:
        return differences(*reports)
    report = merged(reports)
    if to:
        return _written(report, to), 0
    return _shown(report), report.exit_status


def _validate(files: Sequence[Path], *, merge: bool, to: Sequence[Path]) -> None:
    """Raise ValueError for a combination of arguments that means nothing."""
    if len(files) > 2 and not merge:
        raise ValueError(f"two reports are compared, but {len(files)} are given; add --merge for shards of one run")
    if len(files) == 2 and not merge and to:
        raise ValueError("--to writes one report; name one, or add --merge for shards of one run")
    for file in to:
        validate_file(file, "--to")


def _written(report: Report, files: Sequence[Path]) -> list[str]:
    for file in files:
        if error := write(report, file):
            raise ValueError(error)
    return [f"wrote {file}" for file in files]


def _shown(report: Report) -> list[str]:
    drawn = matrix(report.verdicts, plain=needs_plain(sys.stdout.encoding)) if report.verdicts else []
    return [*drawn, "", *summarise(report.verdicts, incomplete=report.incomplete)]
