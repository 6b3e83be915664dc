"""How verdicts are printed while they are reached: in colour, and below a progress bar."""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from mha.conformance.reports.entries import SECTIONS
from mha.conformance.reports.layout import WIDTH, counted, fitted, width_of, wrapped
from mha.conformance.reports.summary import QUIET, SIGNS
from mha.conformance.reports.terminal import STYLES
from mha.conformance.reports.text import HANGING, brief, describe, in_columns, place
from mha.conformance.results import Verdict, status_of

# Where every clause is judged, these are only counted.
COUNTED = (*QUIET, "blocked")
# In columns: a terminal that is narrower has no room for a bar.
NARROW = 60
# At the start of the lines of a description.
LABELS = (
    "diagnosis|seen in|message|steps|usual fix|case|sizes|last call|blocked by|judged|clause|why"
    "|libraries|source|more"
)
TITLES = "|".join(map(re.escape, SECTIONS.values()))
# What is coloured at a terminal, which repeats what the words say.
COLOURS = {rf"(?m)^{re.escape(status)}(?= )": STYLES[sign] for status, (sign, _) in SIGNS.items()}
COLOURS |= {
    "DOES NOT CONFORM": STYLES["✗"],
    r"\bCONFORMS\b": STYLES["✓"],
    rf"(?m)^({TITLES}):$": "bold",
    rf"(?m)^({LABELS})(?=  )": "cyan",
}


class Printer:
    """Prints paragraphs, with a blank line between them, and lines, one below the other.

    Texts are printed as they are: nothing in them is markup, and no line is broken.

    width: in columns, of the lines to print.
    error: why no more is printed, as where a disk is full; empty where all is.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.width = width_of(console.file)
        self.error = ""
        self.last: Literal["", "paragraph", "line"] = ""

    def paragraph(self, text: str) -> None:
        """Print a paragraph."""
        self._print(Text(text.rstrip("\n")), "paragraph")

    def folded(self, text: str) -> None:
        """Print a paragraph, each of its lines folded to the width of the terminal."""
        self.paragraph(fitted(text, self.console.file))

    def line(self, text: str) -> None:
        """Print a line."""
        self._print(Text(text), "line")

    def drawing(self, lines: Sequence[str]) -> None:
        """Print lines that hold escape sequences for colours, as a paragraph."""
        self._print(Text.from_ansi("\n".join(lines)), "paragraph")

    def _print(self, text: Text, kind: Literal["paragraph", "line"]) -> None:
        for pattern, style in COLOURS.items():
            text.highlight_regex(pattern, style)
        try:
            if self.last and (self.last, kind) != ("line", "line"):
                self.console.print()
            self.console.print(text, soft_wrap=True)
        except OSError as error:
            self.error = f"the output cannot be written: {error.strerror}"
            self.console = Console(file=StringIO(), highlight=False)
        self.last = kind


def print_drawing(lines: Sequence[str]) -> None:
    """Print lines that hold escape sequences for colours; raises ValueError if that fails."""
    printer = Printer(Console(highlight=False))
    printer.drawing(lines)
    if printer.error:
        raise ValueError(printer.error)


def print_verdict(printer: Printer, verdict: Verdict, *, in_full: bool) -> None:
    """Print a verdict: in a line, or in full if it is not a pass and the clause was asked for."""
    if in_full and verdict.status not in QUIET:
        printer.paragraph(describe(verdict, printer.width))
    elif in_full or verdict.status not in COUNTED:
        printer.line(line(verdict, printer.width))


def line(verdict: Verdict, width: int = WIDTH) -> str:
    """Return a verdict in a line or two."""
    text = counted(verdict.examples, "case") if verdict.status == "pass" else brief(verdict)
    row = in_columns(status_of(verdict), verdict.clause, f"{place(verdict)}: {text}")
    return wrapped(row, width, "", HANGING)


def progress_bar(console: Console, clauses: Sequence[str]) -> Progress:
    """Return a progress bar, shown on a terminal only and erased at the end.

    clauses: those to be judged, in order, and an empty one for the end.
    """
    columns: list[ProgressColumn] = [TextColumn("{task.description:7}")]
    if console.width >= NARROW:
        columns.append(BarColumn())
    columns += [
        MofNCompleteColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    ]
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    bar.add_task(clauses[0], total=len(clauses) - 1, counts="")
    return bar


def advance(bar: Progress, verdicts: Sequence[Verdict], clause: str) -> None:
    """Move the bar to the next clause, with the counts of the verdicts until now."""
    cases = sum(verdict.examples for verdict in verdicts)
    failed = sum(not verdict.conforms for verdict in verdicts)
    counts = f"{counted(cases, 'case')}, {failed} failed"
    bar.update(bar.task_ids[0], completed=len(verdicts), description=clause, counts=counts)
