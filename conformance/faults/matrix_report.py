"""The kill matrix as text, JSON and a table."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from statistics import median

from mha.conformance.faults.baselines import CHECKS
from mha.conformance.faults.kill_matrix import Kill


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
