"""The matrix of a run in the terminal: implementations down, kinds and families of clauses across."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mha.conformance.reports.summary import PLAIN, Cell, by_family, cell_of, legend, tally
from mha.conformance.reports.text import WIDTH, visible_name
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
    rows, signs = [], set()
    for name, own in by_implementation(verdicts).items():
        cells = {letters: cell_of(members) for letters, members in by_family(own).items()}
        signs |= {cell.sign for cell in cells.values()}
        rows.append((visible_name(name), _counts(own) | _signs(cells, plain)))
    meanings = "   ".join(_plain(entry) if plain else entry for entry in legend(signs))
    colored = color and "NO_COLOR" not in os.environ
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=colored, color_system="standard" if colored else None
    )
    for table in _tables(rows, width):
        console.print(table)
    console.print(Text("\n".join((meanings, *NOTES)), style="dim"), highlight=False)
    drawn = file.getvalue().replace("─", "-") if plain else file.getvalue()
    return [line.rstrip() for line in drawn.splitlines()]


def needs_plain(encoding: str | None) -> bool:
    """Return whether an output with this encoding cannot show the signs."""
    try:
        "".join(PLAIN).encode(encoding or "utf-8")
    except (LookupError, UnicodeEncodeError):
        return True
    return False


def _tables(rows: Sequence[tuple[str, Mapping[str, Text]]], width: int) -> Iterator[Table]:
    """Yield tables with as many columns each as fit into the width; a row is a name, and a cell for
    each column.
    """
    given = dict.fromkeys(heading for _, cells in rows for heading in cells)
    label = min(max(len(name) for name, _ in rows), LONGEST_LABEL)
    for part in _parts(
        [heading for heading in (*KINDS, *FAMILIES) if heading in given], width - label
    ):
        table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
        table.add_column("", max_width=label, no_wrap=True, overflow="ellipsis")
        for heading in part:
            table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
        for name, cells in rows:
            table.add_row(Text(name), *(cells.get(heading, Text("")) for heading in part))
        yield table


def _parts(headings: Sequence[str], width: int) -> Iterator[list[str]]:
    """Yield headings in groups, each of which fits into the width with a space before each; one
    always does.
    """
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
    counts = tally(verdicts).must.items()
    return {
        kind: Text(f"{c.passing}/{c.judged}", "green" if c.passing == c.judged else "bold")
        for kind, c in counts
    }


def _signs(cells: Mapping[str, Cell], plain: bool) -> dict[str, Text]:
    shown = {letters: _plain(cell.text) if plain else cell.text for letters, cell in cells.items()}
    return {
        letters: Text(text, STYLES.get(cells[letters].sign, "")) for letters, text in shown.items()
    }


def _plain(text: str) -> str:
    return text.replace(text[0], PLAIN.get(text[0], text[0]), 1)
