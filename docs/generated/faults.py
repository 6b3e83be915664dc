"""The faulty implementations of the self-test, by the clause that must catch them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from mha.conformance.faults.registry import FAULTS, Fault
from mha.conformance.harness.known_bad.answers import REJECTED, TextbookAttention
from mha.spec import CLAUSES
from mha.spec.clauses import FAMILIES


def tables() -> str:
    """Return all faults, a heading for each clause."""
    by_clause: dict[str, dict[str, Fault]] = {}
    for fault in FAULTS:
        by_clause.setdefault(fault.clause, {}).setdefault(fault.name, fault)
    named = {fault.name: fault for fault in FAULTS}
    cells = {(fault.name, fault.clause, fault.dtype) for fault in FAULTS}
    triggered = [fault for fault in named.values() if fault.trigger]
    parts = [
        f"{len(named)} faults, {len(triggered)} of them with a condition under which alone they"
        f" show; {len(cells)} clauses and dtypes that must catch them.\n"
    ]
    for letters, family in FAMILIES.items():
        parts.append(f"## {letters}: {family.title}\n")
        for clause in CLAUSES.values():
            if clause.family == letters and clause.id in by_clause:
                link = f"[{clause.id}](clauses/{clause.id.lower()}.md)"
                parts += [f"### {link} {clause.title}\n", *table_of(by_clause[clause.id].values())]
                parts.append("")
    return "\n".join(parts)


def known_bad() -> str:
    """Return the table of the answers that properties must reject."""
    lines = ["| answer | what is wrong |", "|---|---|"]
    for name, defect in REJECTED.items():
        if defect.attention is not TextbookAttention:  # which is correct, to be held against it
            lines.append(f"| `{name}` | {_cell(defect.text)} |")
    return "\n".join(lines)


def table_of(faults: Iterable[Fault]) -> Iterator[str]:
    """Yield the lines of a table of faults."""
    yield "| fault | what is wrong | only where |"
    yield "|---|---|---|"
    for fault in faults:
        name = f"[{fault.name}]({fault.source})" if fault.source else fault.name
        yield f"| {name} | {_cell(fault.defect)} | {_cell(fault.trigger)} |"


def _cell(text: str) -> str:
    """Return a text that can stand in a cell of a table."""
    parts = re.split(r"(`[^`]*`)", text)  # code is at the odd places
    for place, part in enumerate(parts):
        escaped = part.replace("|", "\\|")
        parts[place] = escaped if place % 2 else re.sub(r"([*_<])", r"\\\1", escaped)
    return "".join(parts)
