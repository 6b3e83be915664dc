"""The verdicts of a run on disk, one by one: a run whose process is ended loses none of them.

A journal is a file of lines of JSON: the report without verdicts, and then each verdict, as one to
be judged (its message says that judging did not end) and again as it was reached.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from secrets import token_hex
from typing import IO

from mha.conformance.reports.files import LAST, save_last
from mha.conformance.reports.merge import Key, key_of
from mha.conformance.reports.writing import make_ignored_folder
from mha.conformance.results import Report, Verdict, read_verdict

NAMES = "run-*.jsonl"
# The message of a verdict on a clause that is being judged.
STARTED = "judging did not end: the run was ended"


class Journal:
    """A journal that is written; where its folder cannot be written to, nothing is."""

    def __init__(self, file: IO[str] | None) -> None:
        self.file = file

    def start(self, report: Report) -> None:
        """Write the report, without its verdicts, as that of a run that has not ended."""
        self._write(asdict(replace(report, verdicts=(), incomplete=True)))

    def note(self, verdict: Verdict) -> None:
        """Write a verdict; a later one on the same clause counts."""
        self._write(asdict(verdict))

    def _write(self, data: object) -> None:
        if self.file:
            # A full disk; `mha` says so when it writes the report.
            with suppress(OSError, ValueError):
                self.file.write(json.dumps(data) + "\n")
                self.file.flush()


@contextmanager
def journal(folder: Path) -> Iterator[Journal]:
    """Keep a journal in a folder for the block; it is left where the block ends in an error."""
    place = (folder / LAST.parent).absolute() / NAMES.replace("*", f"{os.getpid()}-{token_hex(4)}")
    file = None
    with suppress(OSError):
        make_ignored_folder(place.parent)
        file = place.open("x", encoding="utf-8")
    yield Journal(file)
    if file:
        with suppress(OSError):
            file.close()
            place.unlink()


def recover(folder: Path) -> list[Report]:
    """Save the reports of runs that were ended before they could, and return them; no link is
    followed.
    """
    found: list[Report] = []
    place = folder / LAST.parent
    if place.is_symlink():
        return found
    for file in sorted(place.glob(NAMES)):
        if file.is_symlink() or _is_running(file):
            continue
        report = None
        with suppress(OSError, ValueError, RecursionError):
            report = _read(file)
        try:
            file.unlink()  # before it is saved, which looks for journals too
        except OSError:
            continue
        if report and report.verdicts:
            save_last(report, folder)
            found.append(report)
    return found


def _read(file: Path) -> Report:
    """Return the report of a journal, whose last line may be cut; raises ValueError for others."""
    first, *lines = file.read_text(encoding="utf-8").splitlines() or [""]
    report = Report.from_json(first)
    verdicts: dict[Key, Verdict] = {}
    for line in lines:
        with suppress(ValueError, RecursionError):
            verdict = read_verdict(json.loads(line))
            verdicts[key_of(verdict)] = verdict
    return replace(report, verdicts=tuple(verdicts.values()))


def _is_running(file: Path) -> bool:
    """Return whether the process that writes a journal is there, by its number in the name."""
    try:
        os.kill(int(file.stem.split("-")[1]), 0)
    except (ValueError, OverflowError):  # of a name that is not ours
        return False
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
