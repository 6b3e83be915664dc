"""The matrix of a run in the terminal: implementations down, kinds and families across."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mha.conformance.reports.layout import WIDTH
from mha.conformance.reports.summary import PLAIN, Cell, cells_by_family, legend, tally
from mha.conformance.reports.text import visible_name
from mha.conformance.results import Verdict, by_implementation
from mha.spec.clauses import FAMILIES, KINDS

# In columns: the most of an implementation's name.
LONGEST_LABEL = 24
STYLES = {
    "✗": "bold red",
    "!": "bold red",
    "b": "red",
    "w": "yellow",
    "s": "yellow",
    "✓": "green",
    "-": "dim",
}
NOTES = (
    f"{', '.join(KINDS)}: the required clauses that pass, of those judged.",
    "Each other cell: the worst status in the family, and how many clauses have it.",
)


def matrix(
    verdicts: Iterable[Verdict], *, width: int = WIDTH, color: bool = False, plain: bool = False
) -> list[str]:
    """Return the lines of the matrix and its legend; colour only repeats what the signs say.

    width: in columns; kinds and families that do not fit continue below. color: whether the
    terminal has colours; NO_COLOR overrides it. plain: ASCII only.
    """
    rows = []
    signs: set[str] = set()
    for name, own in by_implementation(verdicts).items():
        cells = cells_by_family(own)
        signs.update(cell.sign for cell in cells.values())
        rows.append((visible_name(name), _counts(own) | _signs(cells, plain)))
    meanings = legend(signs)
    if plain:
        meanings = list(map(_plain, meanings))
    console = _console(width, colored=color and "NO_COLOR" not in os.environ)
    with console.capture() as drawn:
        for table in _tables(rows, width):
            console.print(table)
        notes = "\n".join(("   ".join(meanings), *NOTES))
        console.print(Text(notes, style="dim"), highlight=False)
    text = drawn.get()
    if plain:
        text = text.replace("─", "-")
    return [line.rstrip() for line in text.splitlines()]


def _console(width: int, *, colored: bool) -> Console:
    """Return a console that prints nowhere, whatever stdout is."""
    system: Literal["standard"] | None = "standard" if colored else None
    return Console(file=io.StringIO(), width=width, force_terminal=colored, color_system=system)


def needs_plain(encoding: str | None) -> bool:
    """Return whether an output with this encoding cannot show the signs."""
    try:
        "".join(PLAIN).encode(encoding or "utf-8")
    except (LookupError, UnicodeEncodeError):
        return True
    return False


def _tables(rows: Sequence[tuple[str, Mapping[str, Text]]], width: int) -> Iterator[Table]:
    """Yield tables of as many columns as fit into the width.

    A row is a name, and a cell for each column.
    """
    given: set[str] = set()
    label = 0
    for name, cells in rows:
        given.update(cells)
        label = min(max(label, len(name)), LONGEST_LABEL)
    headings = [heading for heading in (*KINDS, *FAMILIES) if heading in given]
    for part in _parts(headings, width - label):
        table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
        table.add_column("", max_width=label, no_wrap=True, overflow="ellipsis")
        for heading in part:
            table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
        for name, cells in rows:
            table.add_row(Text(name), *(cells.get(heading, Text("")) for heading in part))
        yield table


def _parts(headings: Sequence[str], width: int) -> Iterator[list[str]]:
    """Yield headings in groups that fit into the width with a space before each, one at least."""
    part: list[str] = []
    for heading in headings:
        if part and len(" ".join(["", *part, heading])) > width:
            yield part
            part = []
        part.append(heading)
    if part:
        yield part


def _counts(verdicts: Iterable[Verdict]) -> dict[str, Text]:
    """Return how many required clauses of each kind pass, of those judged."""
    texts: dict[str, Text] = {}
    for kind, count in tally(verdicts).must.items():
        style = "green" if count.passing == count.judged else "bold"
        texts[kind] = Text(f"{count.passing}/{count.judged}", style)
    return texts


def _signs(cells: Mapping[str, Cell], plain: bool) -> dict[str, Text]:
    """Return the sign and the number of each family, in its colour."""
    texts = {}
    for letters, cell in cells.items():
        shown = _plain(cell.text) if plain else cell.text
        texts[letters] = Text(shown, STYLES.get(cell.sign, ""))
    return texts


def _plain(text: str) -> str:
    """Return a text that begins with a sign in ASCII."""
    return text.replace(text[0], PLAIN.get(text[0], text[0]), 1)
