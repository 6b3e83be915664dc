"""The figures of the site, drawn from the tables of the pages that show them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from generated.links import DOCS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of text and lines that are read on a light page and on a dark one.
GREY = "#808080"
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "figures",
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "grid.color": GREY,
    "grid.alpha": 0.3,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.family": "sans-serif",
}
Table = Sequence[Sequence[str]]


class Figure(NamedTuple):
    """A figure: what it shows, in which size in inches, and how it is drawn from a table.

    heading: how the first cell of the second column of that table begins.
    """

    shows: str
    size: tuple[float, float]
    heading: str
    draw: Callable[[Axes, Table], Any]


def found_faults(axes: Axes, table: Table) -> None:
    """Draw the share of the faults that so many cases find, for each way of choosing them."""
    cases = [int(heading.split()[0]) for heading in table[0][1:5]]
    for name, *cells in table[1:]:
        shares = [float(cell.rstrip("%")) for cell in cells[:4]]
        axes.plot(cases, shares, marker="o", label=name)
    axes.set(xscale="log", xlabel="cases until the fault is found", ylabel="faults found, %")
    axes.set_xticks(cases, map(str, cases))
    axes.set_ylim(0, 102)
    axes.legend(frameon=False)


def growth(axes: Axes, table: Table) -> None:
    """Draw with which power of each size the time of each part grows."""
    sizes = column(table, 0)
    for place, part in enumerate(table[0][1:], 1):
        powers = list(map(float, column(table, place)))
        axes.plot(powers, sizes, "o", label=part.replace("`", ""), markersize=8, alpha=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("power of the size that the time grows with")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def directed(axes: Axes, table: Table) -> None:
    """Draw the median and the largest T/sd of each implementation, and the threshold."""
    names = column(table, 0)
    # Two lines for each name, one above the other.
    for place, label, color, shift in (
        (2, "NUM-7", "tab:blue", -0.15),
        (5, "GRD-8", "tab:orange", 0.15),
    ):
        for row, cell in enumerate(column(table, place)):
            low, high = map(float, cell.split(","))
            axes.plot([low, high], [row + shift] * 2, color=color, alpha=0.6)
            axes.plot(low, row + shift, "|", color=color)
            axes.plot(high, row + shift, "o", color=color, label="" if row else label)
    axes.set_yticks(range(len(names)), names)
    axes.axvline(8, color="tab:red")
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="T/sd: median and largest; red: lambda = 8")
    axes.legend(frameon=False)


def sharpness(axes: Axes, table: Table) -> None:
    """Draw from which change on each rule rejects: half of the problems, and all of them."""
    names = [f"{row[0]}, {row[1]}" for row in table[1:]]
    for place, color, shift in (
        (2, "tab:green", -0.2),
        (3, "tab:orange", 0.0),
        (4, "tab:blue", 0.2),
    ):
        label = table[0][place].partition(":")[0]
        for row, cell in enumerate(column(table, place)):
            low, high = _span(cell)
            axes.plot([low, high], [row + shift] * 2, color=color, alpha=0.6)
            axes.plot(low, row + shift, "o", color=color, label="" if row else label)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(
        xscale="log", xlabel="relative change that is rejected: in half of the problems, to all"
    )
    axes.legend(frameon=False)


def _span(cell: str) -> tuple[float, float]:
    """Return the two numbers of a cell; "never" is what is off the scale.

    >>> _span("3e-01, never"), _span("2e-15, 2e-13 (195)")
    ((0.3, 100.0), (2e-15, 2e-13))
    """
    low, high = cell.partition(" (")[0].split(", ")
    return float(low), 100.0 if high == "never" else float(high)


FIGURES: Mapping[str, Figure] = {
    "bugfinding": Figure(
        "The share of the faults found against the number of cases", (8, 4.5), "1", found_faults
    ),
    "speed": Figure(
        "The power of each size with which the time of each part grows", (8, 3.2), "`sdpa`", growth
    ),
    "sharpness": Figure(
        "The smallest change that each rule rejects, by dtype", (8, 5.5), "changed", sharpness
    ),
    "directed": Figure(
        "Median and largest T/sd of each implementation", (8, 7.5), "NUM-7", directed
    ),
}


def column(table: Table, place: int) -> list[str]:
    """Return the cells of a column, without its heading."""
    return [row[place] for row in table[1:]]


def table_of(markdown: str, heading: str) -> Table:
    """Return the first table whose second column has a heading that begins so, with its heading.

    >>> table_of("| a | b |\\n|---|---|\\n| 1 | 2 |", "b")
    [['a', 'b'], ['1', '2']]
    """
    for block in re.split(r"\n(?!\|)", markdown):
        rows = []
        for line in block.split("\n"):
            if line.startswith("|"):
                rows.append([cell.strip() for cell in line.strip("|").split("|")])
        if len(rows) > 2 and rows[0][1].startswith(heading):
            return [rows[0], *rows[2:]]
    raise ValueError(f"there is no table with a column {heading!r}")


def figure(name: str, page: str) -> str:
    """Return the Markdown that shows a figure in a page."""
    return f"![{FIGURES[name].shows}]({'../' * page.count('/')}figures/{name}.svg)"


def svg(name: str) -> bytes:
    """Return a figure as SVG, drawn from the table of its page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    figure = FIGURES[name]
    table = table_of((DOCS / f"{name}.md").read_text(encoding="utf-8"), figure.heading)
    with rc_context(STYLE):
        canvas = Canvas(figsize=figure.size, layout="constrained")
        figure.draw(canvas.subplots(), table)
        written = io.BytesIO()
        canvas.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return written.getvalue()
