"""`mha show`: what the last run found, without another run: its failures in a line each, or a clause in full."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from mha.conformance.cli.check import QUIET, Printer, line, place, print_verdict
from mha.conformance.reports.files import LAST, read
from mha.conformance.reports.summary import severity
from mha.conformance.reports.text import visible_name, wrapped
from mha.conformance.results import Verdict
from mha.conformance.settings import clauses_of


def show_verdicts(words: Sequence[str], file: Path, script: Path | None = None) -> None:
    """Print what a report says about clauses: each failure in full, with its script, and any other verdict in a line.

    words: ids or families; without any, the failures are listed. script: where the script of the worst failure of the
    clauses is written instead.

    Raises ValueError for an unknown word, a report that cannot be read, one without verdicts on these clauses, and a
    script that is not there or cannot be written.
    """
    printer = Printer(Console(highlight=False))
    verdicts: Sequence[Verdict] = read(file).verdicts
    if script and not words:
        raise ValueError("--script takes the script of one clause: mha show MSK-1 --script FILE")
    if not words:
        list_failures(printer, verdicts, file)
        return
    clauses = clauses_of(words)
    verdicts = [verdict for verdict in verdicts if verdict.clause in clauses]
    if not verdicts:
        raise ValueError(f"{', '.join(clauses)} was not judged in the run of {str(file)!r}; see mha report")
    if script:
        printer.folded(save_script(verdicts, script))
        return
    for verdict in verdicts:
        print_verdict(printer, verdict, in_full=True)


def list_failures(printer: Printer, verdicts: Sequence[Verdict], file: Path) -> None:
    """Print the failures of a run, the worst first, and how to see one of them in full."""
    failures = sorted((verdict for verdict in verdicts if verdict.status not in QUIET), key=severity)
    several = len({verdict.implementation for verdict in verdicts}) > 1
    for verdict in failures:
        text = line(verdict, printer.width)
        if several:
            text = wrapped(f"{visible_name(verdict.implementation)}: {text}", printer.width, "", " " * 24)
        printer.line(text)
    if not failures:
        printer.folded(f"Nothing failed in the run of {str(file)!r} ({len(verdicts)} verdicts).")
        return
    clause, run = failures[0].clause, "" if file == LAST else f" --run {file}"
    scripted = next((verdict.clause for verdict in failures if verdict.script), "")
    hint = f"To see one in full: mha show {clause}{run}"
    if scripted:
        hint += f"; its script in a file: mha show {scripted}{run} --script FILE"
    printer.folded(hint)


def save_script(verdicts: Sequence[Verdict], file: Path) -> str:
    """Write the script of the worst of some verdicts, and return a sentence about it; raises ValueError."""
    scripted = sorted((verdict for verdict in verdicts if verdict.script), key=severity)
    if not scripted:
        raise ValueError(_no_script(min(verdicts, key=severity)))
    first, *rest = scripted
    _write(file, str(first.script))
    others = f" ({len(rest)} other scripts are left out)" if rest else ""
    about = f"{visible_name(first.implementation)}, {first.clause}, {place(first)}{others}"
    return f"The script of {about} is in {str(file)!r}; run it: python {file}"


def _no_script(verdict: Verdict) -> str:
    """Return why there is no script, and what to do instead."""
    clause = verdict.clause
    if verdict.status in QUIET[:2]:
        return f"{clause} has no script, since it did not fail"
    return f"{clause} has no script, since its calls alone do not show the failure; see mha show {clause}"


def _write(file: Path, text: str) -> None:
    """Write a file in one step, so that none is left half written; raises ValueError where that cannot be."""
    if file.is_dir():
        raise ValueError(f"{str(file)!r} is a folder; name a file in it, such as {str(file / 'script.py')!r}")
    partial = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        partial.replace(file)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise ValueError(f"the script cannot be written to {str(file)!r}: {error.strerror}") from None
