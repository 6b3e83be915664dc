"""The kill matrix: what the judge says of every fault of the gallery."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from html import escape
from statistics import median

from mha.conformance.cases.case import Case
from mha.conformance.engine.judge import judge
from mha.conformance.faults.baselines import CHECKS, caught_by
from mha.conformance.faults.gallery import FAULTS, implementations
from mha.conformance.properties.registry import properties

CAUGHT = ("fail", "refused")
CELL, LEFT, TOP = 9, 210, 60
LEGEND = (
    "a fault in each row, a clause in each column",
    "dark: caught by the clause that names the defect",
    "cross: not caught by it; dot: caught by another",
    "grey, at the right: caught by a usual check",
)


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What one clause says of one fault.

    named: whether the gallery names the clause for this fault. first: how many examples it took to the first failure.
    size: the elements of query, key and value in the case that it was shrunk to. case: that case, as code.
    only: where alone the fault shows, if it is right elsewhere. source: where such a fault was seen.
    usual: which of the usual checks do not let the fault pass (see `mha.conformance.faults.baselines`).
    """

    fault: str
    section: str
    wrong: str
    only: str
    source: str
    usual: tuple[str, ...]
    clause: str
    dtype: str
    seed: int
    named: bool
    status: str
    first: int | None
    size: int | None
    case: str | None

    @property
    def caught(self) -> bool:
        """Whether the clause convicts the fault."""
        return self.status in CAUGHT


def kills(seed: int, profile: str, *, every_clause: bool, names: Collection[str] = ()) -> Iterator[Kill]:
    """Judge every fault, or those that are named, by the clauses that must catch it, or by every clause."""
    chosen = [fault for fault in FAULTS if not names or fault.cls.__name__ in names]
    named = {(fault.cls, fault.dtype, fault.clause) for fault in chosen}
    for cls, dtype, section in dict.fromkeys((fault.cls, fault.dtype, fault.section) for fault in chosen):
        implementation = implementations[cls.__name__]
        usual = caught_by(implementation, dtype)
        for clause in (clause for clause in properties() if every_clause or (cls, dtype, clause) in named):
            found = judge(implementation, clause, dtype=dtype, device="cpu", profile=profile, seed=seed, strict=True)
            yield Kill(
                fault=cls.__name__,
                section=section,
                wrong=inspect.cleandoc(cls.__doc__ or "").replace("\n", " "),
                only=vars(cls).get("only", ""),
                source=vars(cls).get("source", ""),
                usual=usual,
                clause=clause,
                dtype=dtype,
                seed=seed,
                named=(cls, dtype, clause) in named,
                status=found.status,
                first=found.first,
                size=elements(found.case) if found.case else None,
                case=found.case,
            )


def elements(code: str) -> int:
    """Return how many numbers the query, key and value of a case have."""
    case: Case = eval(code, {"Case": Case})
    return case.B * case.n_heads * case.head_dim * (case.L + 2 * case.S)


def to_json(found: Iterable[Kill]) -> str:
    """Return every cell of the matrix as JSON."""
    return json.dumps([asdict(kill) for kill in found], indent=1)


def summary(found: Collection[Kill]) -> list[str]:
    """Return how many faults were caught by the clauses that name them, how soon, and in how small a case."""
    named = [kill for kill in found if kill.named]
    firsts = [kill.first for kill in named if kill.caught and kill.first]
    sizes = [kill.size for kill in named if kill.caught and kill.size]
    lines = [f"{sum(kill.caught for kill in named)} of {len(named)} caught by the clause that names the defect"]
    if firsts and sizes:
        within = ", ".join(
            f"{sum(first <= most for first in firsts) / len(named):.0%} within {most}" for most in (1, 10, 100)
        )
        lines.append(f"examples to the first failure: median {median(firsts):g}, worst {max(firsts)}; {within}")
        lines.append(f"elements of the minimal case: median {median(sizes):g}, worst {max(sizes)}")
    rows = {(kill.fault, kill.dtype): kill for kill in named}.values()
    usual = ", ".join(f"{name} {sum(name in kill.usual for kill in rows)}" for name in CHECKS)
    lines.append(f"usual checks catch, of the same {len(rows)} (some faults are in two dtypes): {usual}")
    faults = {kill.fault: kill for kill in named}.values()
    lines.append(f"{sum(bool(kill.only) for kill in faults)} of {len(faults)} faults show only at a coincidence")
    return lines + [f"NOT CAUGHT: {kill.fault} by {kill.clause} ({kill.status})" for kill in named if not kill.caught]


def to_markdown(found: Collection[Kill]) -> str:
    """Return the named cells as a table: the clause that names a fault, and in brackets what else caught it."""
    others: dict[tuple[str, str], list[str]] = {}
    for kill in found:
        if kill.caught and not kill.named:
            others.setdefault((kill.fault, kill.dtype), []).append(kill.clause)
    lines = ["# The kill matrix", "", *(f"- {line}" for line in summary(found)), ""]
    lines += ["| fault | what is wrong | only where | dtype | clause | examples | elements | usual checks |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for kill in (kill for kill in found if kill.named):
        also = others.get((kill.fault, kill.dtype), [])
        name = f"[{kill.fault}]({kill.source})" if kill.source else kill.fault
        clause = " ".join([kill.clause if kill.caught else f"NOT {kill.clause}", *(f"({other})" for other in also)])
        cells = (name, kill.wrong, kill.only or " ", kill.dtype, clause, str(kill.first or " "), str(kill.size or " "))
        lines.append(f"| {' | '.join(cells)} | {', '.join(kill.usual) or 'none'} |")
    return "\n".join(lines) + "\n"


def to_svg(found: Collection[Kill]) -> str:
    """Return a picture: faults in the order of the clauses that name them, and what the usual checks say of each."""
    columns = [clause for clause in properties() if any(kill.clause == clause for kill in found)]
    named = {(kill.fault, kill.dtype): columns.index(kill.clause) for kill in reversed(list(found)) if kill.named}
    rows = sorted(named, key=named.__getitem__)
    beside = LEFT + CELL * (len(columns) + 2)
    width, height = beside + CELL * len(CHECKS) + 4, TOP + CELL * len(rows) + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        "<style>text { font: 7px sans-serif }</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *(f'<text x="4" y="{12 + 10 * place}">{told}</text>' for place, told in enumerate(LEGEND)),
    ]
    for place, clause in enumerate(columns):
        x = LEFT + CELL * place
        parts.append(_upright(x + 7, clause))
        if place and clause[:3] != columns[place - 1][:3]:
            parts.append(f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{height}" stroke="#ccc" stroke-width="0.4"/>')
    parts += [_upright(beside + CELL * place + 7, name) for place, name in enumerate(CHECKS)]
    for place, (fault, dtype) in enumerate(rows):
        y = TOP + CELL * place
        shown = fault if dtype == "float32" else f"{fault} ({dtype})"
        parts.append(f'<text x="{LEFT - 4}" y="{y + 7}" text-anchor="end">{escape(shown)}</text>')
        if place % 5 == 0:
            parts.append(f'<line x1="0" y1="{y}" x2="{width}" y2="{y}" stroke="#ccc" stroke-width="0.4"/>')
        usual = next(kill.usual for kill in found if (kill.fault, kill.dtype) == (fault, dtype))
        for column, name in enumerate(CHECKS):
            if name in usual:
                parts.append(f'<rect x="{beside + CELL * column + 1}" y="{y + 1}" width="7" height="7" fill="#999"/>')
    for kill in found:
        x = LEFT + CELL * columns.index(kill.clause)
        y = TOP + CELL * rows.index((kill.fault, kill.dtype))
        if kill.named and not kill.caught:
            parts.append(f'<path d="M{x + 1} {y + 1}l7 7m0 -7l-7 7" stroke="#b00" stroke-width="1.5"/>')
        elif kill.named:
            parts.append(f'<rect x="{x + 1}" y="{y + 1}" width="7" height="7" fill="#124"/>')
        elif kill.caught:
            parts.append(f'<circle cx="{x + 4.5}" cy="{y + 4.5}" r="1.6" fill="#579"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _upright(x: int, text: str) -> str:
    return f'<text transform="translate({x} {TOP - 4}) rotate(-90)">{text}</text>'
