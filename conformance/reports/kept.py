"""Reports kept between runs of the same code, for what judges before it does something else."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from mha.conformance.reports.writing import make_ignored_folder, make_own_folder, write_own
from mha.conformance.results import Report

FOLDER = Path(".mha") / "verdicts"


def read_kept(place: Path) -> Report | None:
    """Return the report that is kept there, if there is one that can be read."""
    with suppress(OSError, ValueError):
        return Report.from_json(place.read_text(encoding="utf-8"))
    return None


def keep(report: Report, place: Path) -> None:
    """Keep a report, unless it is incomplete, if the folder can be written to."""
    if report.incomplete or report.exit_status == 2:
        return
    with suppress(OSError):
        make_ignored_folder(place.parent.parent)
        make_own_folder(place.parent)
        write_own(place, report.to_json())
