"""The matrix of a run on a terminal: implementations down, families of clauses across."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mha.conformance.reports.summary import PLAIN, Cell, cell_of, families_of, legend
from mha.conformance.reports.text import shown
from mha.conformance.results import Verdict, by_implementation

# In columns: a family with the space before it, and the longest name of an implementation.
COLUMN, LONGEST_LABEL = 4, 24
STYLES = {"✗": "bold red", "!": "bold red", "b": "red", "w": "yellow", "s": "yellow", "✓": "green", "-": "dim"}


def matrix(verdicts: Iterable[Verdict], *, width: int = 110, color: bool = False, plain: bool = False) -> list[str]:
    """Return the lines of the matrix; nothing is told by colour alone.

    width: in columns; where the families do not fit, they go on below. color: of a terminal, unless NO_COLOR is set.
    plain: signs in ASCII.
    """
    by_name = by_implementation(verdicts)
    rows = {
        name: {letters: cell_of(found) for letters, found in families_of(own).items()} for name, own in by_name.items()
    }
    families = list(dict.fromkeys(letters for row in rows.values() for letters in row))
    label = min(max(map(len, map(shown, by_name))), LONGEST_LABEL)
    fitting = max(1, (width - label) // COLUMN)
    drawn = []
    for start in range(0, len(families), fitting):
        part = families[start : start + fitting]
        table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
        table.add_column("", max_width=label, no_wrap=True, overflow="ellipsis")
        for letters in part:
            table.add_column(letters, justify="right", no_wrap=True, min_width=COLUMN - 1)
        for name, row in rows.items():
            cells = [_drawn(row[letters], plain) if letters in row else Text("") for letters in part]
            table.add_row(Text(shown(name)), *cells)
        drawn.append(table)
    signs = {cell.sign for row in rows.values() for cell in row.values()}
    told = "   ".join(_plain(sign) if plain else sign for sign in legend(signs))
    told += "   (a cell has the worst of its family, and in how many clauses)"
    file = io.StringIO()
    colored = color and "NO_COLOR" not in os.environ
    console = Console(file=file, width=width, force_terminal=colored, color_system="standard" if colored else None)
    console.print(*drawn, Text(told, style="dim"), sep="\n", highlight=False)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def needs_plain(encoding: str | None) -> bool:
    """Whether an output cannot show the signs."""
    try:
        "".join(PLAIN).encode(encoding or "utf-8")
    except (LookupError, UnicodeEncodeError):
        return True
    return False


def _drawn(cell: Cell, plain: bool) -> Text:
    return Text(_plain(cell.text) if plain else cell.text, style=STYLES.get(cell.sign, ""))


def _plain(text: str) -> str:
    return text.replace(text[0], PLAIN.get(text[0], text[0]), 1)
