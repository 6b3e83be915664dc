"""Reports kept between runs of the same code, for what judges before it does something else."""

from __future__ import annotations

import sys
import sysconfig
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path

from mha.conformance.reports.writing import make_ignored_folder, make_own_folder, write_own
from mha.conformance.results import Report
from mha.conformance.settings import Settings
from mha.implementations.loaded import every_module, file_of

FOLDER = Path(".mha") / "verdicts"
# What is installed is known by its version.
INSTALLED = ("site-packages", "dist-packages")


def place_of(target: str, settings: Settings) -> Path:
    """Return where the report on a target is kept: its name holds the settings, all versions, and the sources in use.

    The sources are the files of all modules that are loaded, except for those of Python and of installed packages.
    """
    versions = sorted((each.name, each.version) for each in distributions())
    digest = sha256(repr((target, settings, sys.version, versions)).encode())
    for file in sorted(_sources()):
        digest.update(f"{file}\n".encode())
        digest.update(Path(file).read_bytes())
    return FOLDER / f"{digest.hexdigest()[:32]}.json"


def _sources() -> set[str]:
    standard = sysconfig.get_paths()["stdlib"]
    files = {file_of(module) for _, module in every_module()}
    own = {file for file in files if not file.startswith(standard) and not set(Path(file).parts) & set(INSTALLED)}
    return {file for file in own if Path(file).is_file()}


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
