"""Reports in files: their forms by the ending of the name, and the last run, which is always kept."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from mha.conformance.results import Report

FORMS = (".html", ".json", ".md")
# What `mha report`, `mha replay` and `mha waive` read unless told otherwise.
LAST = Path(".mha") / "last.json"


def validate_file(file: Path, what: str) -> None:
    """Raise ValueError for a file that could not be written, before anything is judged."""
    if file.suffix not in FORMS:
        raise ValueError(f"{what} must be the name of a {' or '.join(FORMS)} file, but is {str(file)!r}")
    if not file.resolve().parent.is_dir():
        raise ValueError(f"{what}: there is no folder {str(file.parent)!r} to write {file.name!r} in")


def rendered(report: Report, form: str) -> str:
    """Return the report in one of `FORMS`."""
    if form == ".html":
        from mha.conformance.reports.html import to_html

        return to_html(report)
    if form == ".md":
        from mha.conformance.reports.markdown import to_markdown

        return to_markdown(report)
    return report.to_json() + "\n"


def write(report: Report, file: Path) -> str:
    """Write the report in the form that the file's name tells; return why not, "" if it is written."""
    try:
        file.write_text(rendered(report, file.suffix), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        return f"the report cannot be written to {str(file)!r}: {error.strerror}; it stands above"
    return ""


def keep(report: Report, folder: Path) -> None:
    """Keep a report as that of the last run in a folder, if it can be written to."""
    place = folder / LAST
    part = place.with_name(f"{os.getpid()}.part")
    try:
        place.parent.mkdir(exist_ok=True)
        (place.parent / ".gitignore").write_text("*\n", encoding="utf-8")
        part.write_text(rendered(report, ".json"), encoding="utf-8")
        part.replace(place)  # at once: another run may read it
    except OSError:
        with suppress(OSError):
            part.unlink()


def read(file: Path) -> Report:
    """Read a report; raises ValueError, in a line, for what is none."""
    if file == LAST and not file.exists():
        raise ValueError("no run is kept in this folder: judge something first, as with mha check, or name a report")
    try:
        return Report.from_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the report {str(file)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{str(file)!r}: {error}") from None
