"""The kill matrix as text, JSON, a table and a picture."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from html import escape
from statistics import median

from mha.conformance.faults.baselines import CHECKS
from mha.conformance.faults.kill_matrix import Kill
from mha.conformance.properties.registry import properties

# Of the picture, in its units: the side of a cell, and the space for the names of faults and of
# clauses.
CELL, LEFT, TOP = 9, 210, 60
LEGEND = (
    "rows: faults; columns: clauses",
    "square: caught by a clause that must catch it",
    "cross: not caught by it; dot: caught by another",
    "grey, at the right: a baseline check fails",
)


def to_json(kills: Iterable[Kill]) -> str:
    """Return every cell as JSON."""
    return json.dumps([asdict(kill) for kill in kills], indent=1)


def summary(kills: Collection[Kill]) -> list[str]:
    """Return in lines how many faults are caught as they must, how soon, in how small a case."""
    named = [kill for kill in kills if kill.named]
    caught = [kill for kill in named if kill.caught]
    # One kill stands for a fault in all of its cells.
    faults = {kill.fault: kill for kill in named}.values()
    triggered = [kill for kill in faults if kill.trigger]
    lines = [
        f"{len(caught)} of {len(named)} caught by the clause that must catch it",
        *_sizes(named),
        _baselines({(kill.fault, kill.dtype): kill for kill in named}.values()),
        f"{len(triggered)} of {len(faults)} faults need a trigger",
    ]
    missed = [kill for kill in named if not kill.caught]
    lines += [f"NOT CAUGHT: {kill.fault} by {kill.clause} ({kill.status})" for kill in missed]
    return lines


def _baselines(rows: Collection[Kill]) -> str:
    """Return how many faults, each in a dtype, fail each baseline check."""
    counts = []
    for name in CHECKS:
        failing = [kill for kill in rows if name in kill.baselines]
        counts.append(f"{name} {len(failing)}")
    return f"of {len(rows)} faults and dtypes, the baseline checks catch: {', '.join(counts)}"


def _sizes(named: Sequence[Kill]) -> list[str]:
    """Return how many cases were needed, and how large minimal ones are; [] where none failed."""
    caught = [kill for kill in named if kill.caught]
    counts = [kill.cases_to_failure for kill in caught if kill.cases_to_failure]
    sizes = [kill.minimal_case_elements for kill in caught if kill.minimal_case_elements]
    if not counts or not sizes:
        return []
    shares = []
    for most in (1, 10, 100):
        early = [count for count in counts if count <= most]
        shares.append(f"{len(early) / len(named):.0%} within {most}")
    within = ", ".join(shares)
    return [
        f"cases to the first failure: median {median(counts):g}, most {max(counts)}; {within}",
        f"elements of the minimal case: median {median(sizes):g}, most {max(sizes)}",
    ]


def to_markdown(kills: Collection[Kill]) -> str:
    """Return a table of the cells that must be caught; other catching clauses are in brackets."""
    others: dict[tuple[str, str], list[str]] = {}
    for kill in kills:
        if kill.caught and not kill.named:
            others.setdefault((kill.fault, kill.dtype), []).append(f"({kill.clause})")
    lines = ["# The kill matrix", "", *(f"- {line}" for line in summary(kills)), ""]
    lines += [
        "| fault | defect | trigger | dtype | clause | cases | elements | baselines |",
        f"|{'---|' * 8}",
    ]
    lines += [_line(kill, others.get((kill.fault, kill.dtype), [])) for kill in kills if kill.named]
    return "\n".join(lines) + "\n"


def _line(kill: Kill, others: Sequence[str]) -> str:
    """Return one line of the table."""
    cells = (
        f"[{kill.fault}]({kill.source})" if kill.source else kill.fault,
        kill.defect,
        kill.trigger or " ",
        kill.dtype,
        " ".join([kill.clause if kill.caught else f"NOT {kill.clause}", *others]),
        str(kill.cases_to_failure or " "),
        str(kill.minimal_case_elements or " "),
        ", ".join(kill.baselines) or "none",
    )
    return f"| {' | '.join(cells)} |"


def to_svg(kills: Collection[Kill]) -> str:
    """Return a picture: a row for each fault, a column for each clause and baseline check."""
    judged = {kill.clause for kill in kills}
    columns = [clause for clause in properties() if clause in judged]
    first: dict[tuple[str, str], int] = {}  # the column of the first clause that must catch it
    for kill in reversed(list(kills)):
        if kill.named:
            first[kill.fault, kill.dtype] = columns.index(kill.clause)
    rows = sorted(first, key=first.__getitem__)
    beside = LEFT + CELL * (len(columns) + 2)
    width, height = beside + CELL * len(CHECKS) + 4, TOP + CELL * len(rows) + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        "<style>text { font: 7px sans-serif }</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *(f'<text x="4" y="{12 + 10 * place}">{line}</text>' for place, line in enumerate(LEGEND)),
        *_headings(columns, beside, height),
    ]
    baselines = {(kill.fault, kill.dtype): kill.baselines for kill in kills}
    for place, row in enumerate(rows):
        parts += _row(place, row, baselines[row], beside, width)
    for kill in kills:
        x = LEFT + CELL * columns.index(kill.clause)
        y = TOP + CELL * rows.index((kill.fault, kill.dtype))
        parts += _mark(kill, x, y)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _headings(columns: Sequence[str], beside: int, height: int) -> Iterator[str]:
    """Yield the names of the columns, and a line before each family of clauses."""
    for place, clause in enumerate(columns):
        x = LEFT + CELL * place
        yield _upright(x + 7, clause)
        if place and clause[:3] != columns[place - 1][:3]:
            yield (
                f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{height}" stroke="#ccc"'
                ' stroke-width="0.4"/>'
            )
    for place, name in enumerate(CHECKS):
        yield _upright(beside + CELL * place + 7, name)


def _row(
    place: int, row: tuple[str, str], baselines: Collection[str], beside: int, width: int
) -> Iterator[str]:
    """Yield the name of a fault, a line before every fifth, and its squares of baseline checks."""
    fault, dtype = row
    y = TOP + CELL * place
    label = fault if dtype == "float32" else f"{fault} ({dtype})"
    yield f'<text x="{LEFT - 4}" y="{y + 7}" text-anchor="end">{escape(label)}</text>'
    if place % 5 == 0:
        yield f'<line x1="0" y1="{y}" x2="{width}" y2="{y}" stroke="#ccc" stroke-width="0.4"/>'
    for column, name in enumerate(CHECKS):
        if name in baselines:
            yield (
                f'<rect x="{beside + CELL * column + 1}" y="{y + 1}" width="7" height="7"'
                ' fill="#999"/>'
            )


def _mark(kill: Kill, x: int, y: int) -> Iterator[str]:
    """Yield the mark of a cell, if it has one; x and y are its corner."""
    if kill.named and not kill.caught:
        yield f'<path d="M{x + 1} {y + 1}l7 7m0 -7l-7 7" stroke="#b00" stroke-width="1.5"/>'
    elif kill.named:
        yield f'<rect x="{x + 1}" y="{y + 1}" width="7" height="7" fill="#124"/>'
    elif kill.caught:
        yield f'<circle cx="{x + 4.5}" cy="{y + 4.5}" r="1.6" fill="#579"/>'


def _upright(x: int, text: str) -> str:
    return f'<text transform="translate({x} {TOP - 4}) rotate(-90)">{text}</text>'
