"""The matrix of a run in the terminal: implementations down, families of clauses across."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mha.conformance.reports.summary import PLAIN, Cell, by_family, cell_of, legend
from mha.conformance.reports.text import WIDTH, visible_name
from mha.conformance.results import Verdict, by_implementation

# In columns: a family with the space before it, and the most of an implementation's name.
FAMILY_WIDTH, LONGEST_LABEL = 4, 24
STYLES = {"✗": "bold red", "!": "bold red", "b": "red", "w": "yellow", "s": "yellow", "✓": "green", "-": "dim"}
NOTE = "Each cell: the worst status in the family, and how many clauses have it."


def matrix(verdicts: Iterable[Verdict], *, width: int = WIDTH, color: bool = False, plain: bool = False) -> list[str]:
    """Return the lines of the matrix and its legend; colour only repeats what the signs say.

    width: in columns; families that do not fit continue below. color: whether the terminal has colours; NO_COLOR
    overrides it. plain: ASCII only.
    """
    rows = [
        (visible_name(name), {letters: cell_of(members) for letters, members in by_family(own).items()})
        for name, own in by_implementation(verdicts).items()
    ]
    signs = {cell.sign for _, cells in rows for cell in cells.values()}
    meanings = "   ".join(_plain(entry) if plain else entry for entry in legend(signs))
    colored = color and "NO_COLOR" not in os.environ
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=colored, color_system="standard" if colored else None)
    for table in _tables(rows, width, plain):
        console.print(table)
    console.print(Text(f"{meanings}\n{NOTE}", style="dim"), highlight=False)
    drawn = file.getvalue().replace("─", "-") if plain else file.getvalue()
    return [line.rstrip() for line in drawn.splitlines()]


def width_of(stream: TextIO) -> int:
    """Return how many columns to use: those of a terminal, and `WIDTH` at most and for a file or pipe."""
    return min(shutil.get_terminal_size().columns, WIDTH) if stream.isatty() else WIDTH


def needs_plain(encoding: str | None) -> bool:
    """Return whether an output with this encoding cannot show the signs."""
    try:
        "".join(PLAIN).encode(encoding or "utf-8")
    except (LookupError, UnicodeEncodeError):
        return True
    return False


def _tables(rows: Sequence[tuple[str, Mapping[str, Cell]]], width: int, plain: bool) -> Iterator[Table]:
    """Yield tables with as many families each as fit into the width; a row is a name and a cell for each family."""
    families = list(dict.fromkeys(letters for _, cells in rows for letters in cells))
    label = min(max(len(name) for name, _ in rows), LONGEST_LABEL)
    fitting = max(1, (width - label) // FAMILY_WIDTH)
    for start in range(0, len(families), fitting):
        part = families[start : start + fitting]
        table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
        table.add_column("", max_width=label, no_wrap=True, overflow="ellipsis")
        for letters in part:
            table.add_column(letters, justify="right", no_wrap=True, min_width=FAMILY_WIDTH - 1)
        for name, cells in rows:
            table.add_row(Text(name), *(_styled(cells.get(letters), plain) for letters in part))
        yield table


def _styled(cell: Cell | None, plain: bool) -> Text:
    if cell is None:
        return Text("")
    return Text(_plain(cell.text) if plain else cell.text, style=STYLES.get(cell.sign, ""))


def _plain(text: str) -> str:
    return text.replace(text[0], PLAIN.get(text[0], text[0]), 1)
