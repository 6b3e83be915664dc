"""Reports in files: the format is chosen by the suffix, and the last run is always saved."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import UTC, datetime
from errno import ELOOP
from pathlib import Path

from mha.conformance.reports.html import to_html
from mha.conformance.reports.markdown import to_markdown
from mha.conformance.reports.merge import updated
from mha.conformance.reports.writing import (
    make_ignored_folder,
    make_own_folder,
    write_own,
    write_text,
)
from mha.conformance.results import Report

# A format is a row here; the help of `mha` and of the pytest plugin lists the suffixes.
FORMATS: dict[str, Callable[[Report], str]] = {
    ".html": to_html,
    ".json": Report.to_json,
    ".md": to_markdown,
}
# What `mha report`, `mha replay` and `mha waive` read by default.
LAST = Path(".mha") / "last.json"
# Earlier last reports, by when they were replaced, and how many of them are kept.
HISTORY, KEPT = Path(".mha") / "history", 10


def suffixes(formats: Collection[str] = tuple(FORMATS)) -> str:
    """Return the suffixes of some formats as they are listed in a sentence.

    >>> suffixes()
    '.html, .json or .md'
    """
    *most, last = formats
    return f"{', '.join(most)} or {last}"


def validate_file(file: Path, option: str) -> None:
    """Raise ValueError for a file to which no report can be written; option: that named it."""
    if file.suffix not in FORMATS:
        raise ValueError(
            f"{option} takes a file name that ends in {suffixes()}, but was given {str(file)!r}"
        )
    if not file.resolve().parent.is_dir():
        raise ValueError(
            f"{str(file)!r} cannot be written, since there is no folder {str(file.parent)!r}"
        )


def render(report: Report, suffix: str) -> str:
    """Return the report in one of `FORMATS`."""
    return FORMATS[suffix](report) + "\n"


def write(report: Report, file: Path) -> str:
    """Write the report in the format of the file's suffix; return an error message, or ""."""
    try:
        write_text(file, render(report, file.suffix))
    except OSError as error:
        return (
            f"the report cannot be written to {str(file)!r}: {error.strerror}; its results are"
            " printed above"
        )
    return ""


def save_last(report: Report, folder: Path) -> str:
    """Save a report as that of the last run in a folder, if that can be; return a warning, or "".

    A narrower run updates the last report; one that is replaced is kept in `HISTORY`, with a few
    before it. No link is written through, and nothing in an earlier report says where a file is
    written: its folder may be one that someone else has prepared.
    """
    from mha.conformance.reports.journal import recover  # which imports this module

    target = folder / LAST
    recover(folder)  # what was ended before: it is older than this report
    try:
        make_ignored_folder(target.parent)
    except OSError as error:
        return _warning(error)
    saved, warning = report, ""
    last = _read_if_any(target)
    if last:
        saved = updated(last, report)
        if saved is report:
            warning = _keep(last, folder / HISTORY)
    with suppress(OSError):
        write_own(target, render(saved, ".json"))  # in one step: another run may be reading it
    return warning


def _keep(last: Report, history: Path) -> str:
    """Keep a report that is replaced, and a few before it; return a warning, or ""."""
    replaced = datetime.now(UTC).isoformat(timespec="microseconds")
    try:
        make_own_folder(history)
        write_own(history / f"{replaced.replace(':', '')}.json", render(last, ".json"))
        for old in sorted(history.glob("*.json"))[:-KEPT]:
            old.unlink()
    except OSError as error:
        return _warning(error)
    return ""


def _warning(error: OSError) -> str:
    """Return what to say where a run is not saved; "" for a folder that cannot be written."""
    if error.errno != ELOOP:
        return ""
    return f"the run is not saved in {error.filename!r}: {error.strerror}"


def _read_if_any(file: Path) -> Report | None:
    try:
        return _read(file) if file.is_file() else None
    except ValueError:
        return None


def read(file: Path) -> Report:
    """Read a report; raises ValueError for a file that cannot be read or is not a report."""
    if file == LAST:
        from mha.conformance.reports.journal import recover  # which imports this module

        recover(Path())
    if file == LAST and not file.exists():
        raise ValueError("no run is saved in this folder: run `mha check` first, or name a report")
    return _read(file)


def _read(file: Path) -> Report:
    try:
        return Report.from_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the report {str(file)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{str(file)!r}: {error}") from None
