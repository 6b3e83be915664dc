"""`mha show`: the failures of the last run in a line each, or a clause in full."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mha.conformance.cli.console import COUNTED, Printer, print_verdict
from mha.conformance.reports.entries import entries
from mha.conformance.reports.files import LAST, read
from mha.conformance.reports.summary import QUIET, severity
from mha.conformance.reports.text import listing, place, visible_name
from mha.conformance.reports.writing import write_text
from mha.conformance.results import Verdict, by_implementation
from mha.conformance.settings import clauses_of


def show_verdicts(words: Sequence[str], file: Path, script: Path | None = None) -> None:
    """Print each failure of some clauses in full, with its script, and other verdicts in a line.

    words: ids or families; without any, the failures are listed.
    script: where the script of the worst failure of the clauses is written instead.

    Raises ValueError for an unknown word, a report that cannot be read, one without verdicts on
    these clauses, and a script that is not there or cannot be written.
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
        raise ValueError(
            f"{', '.join(clauses)} was not judged in the run of {str(file)!r}; see mha report"
        )
    if script:
        printer.folded(save_script(verdicts, script))
        return
    for verdict in verdicts:
        print_verdict(printer, verdict, in_full=True)


def list_failures(printer: Printer, verdicts: Sequence[Verdict], file: Path) -> None:
    """Print what does not pass, by implementation and cause, and how to see one of them in full."""
    if all(verdict.status in COUNTED for verdict in verdicts):
        printer.folded(f"Nothing failed in the run of {str(file)!r} ({len(verdicts)} verdicts).")
        return
    grouped = by_implementation(verdicts)
    for name, own in grouped.items():
        found = listing(own, printer.width)
        if found and len(grouped) > 1:
            printer.paragraph(f"{visible_name(name)}:")
        if found:
            printer.paragraph("\n".join(found))
    shown: list[Verdict] = []
    for own in grouped.values():
        shown += [entry.first for entry in entries(own)]
    example = min(shown, key=lambda verdict: not verdict.script)  # one with a script, if any has
    command = f"mha show {example.clause}"
    if file != LAST:
        command += f" --run {file}"
    hint = f"To see one in full: {command}"
    if example.script:
        hint += f"; its script in a file: {command} --script FILE"
    printer.folded(hint)


def save_script(verdicts: Sequence[Verdict], file: Path) -> str:
    """Write the script of the worst verdict, and return a sentence about it; raises ValueError."""
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
    if verdict.status in QUIET:
        return f"{clause} has no script, since it did not fail"
    return (
        f"{clause} has no script, since its calls alone do not show the failure; see mha show"
        f" {clause}"
    )


def _write(file: Path, text: str) -> None:
    """Write a script in one step; raises ValueError where that cannot be."""
    if file.is_dir():
        raise ValueError(
            f"{str(file)!r} is a folder; name a file in it, such as {str(file / 'script.py')!r}"
        )
    try:
        write_text(file, text)
    except OSError as error:
        raise ValueError(
            f"the script cannot be written to {str(file)!r}: {error.strerror}"
        ) from None
