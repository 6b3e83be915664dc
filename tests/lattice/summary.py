"""Add up what `make lattice` found: `python tests/lattice/summary.py build/lattice`."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any


def summary(folder: Path) -> str:
    """Return how many inferred classes conform, and how many clauses were judged of each kind."""
    files = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    results = [result for name, result in files.items() if not name.startswith("wrong")]
    how = Counter(result["how"] for result in results)
    conforming = sum(result["report"]["conforms"] for result in results)
    lines = [
        (
            f"{len(results)} classes, {conforming} conform;"
            f" {', '.join(f'{n} {name}' for name, n in how.items())}"
        ),
        "",
    ]
    counts_of: dict[str, list[int]] = defaultdict(list)
    for result in results:
        counts_of[result["kind"]].append(_judged(result["report"]))
    for kind, counts in sorted(counts_of.items()):
        lines.append(
            f"{kind:<36} {len(counts):>4} classes, {min(counts)} to {max(counts)} clauses judged"
        )
    wrong = [result for name, result in files.items() if name.startswith("wrong")]
    judged = sum(result["judged"] for result in wrong)
    failed = sum(bool(result["failed"]) for result in wrong)
    lines += [
        "",
        (
            f"{len(wrong)} wrong classes as they are: {judged} judged, {failed} fail a clause about"
            " their fault"
        ),
    ]
    return "\n".join(lines)


def _judged(report: dict[str, Any]) -> int:
    return sum(verdict["status"] != "not_claimed" for verdict in report["verdicts"])


if __name__ == "__main__":
    print(summary(Path(sys.argv[1])))
