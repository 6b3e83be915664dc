"""The gallery in one half-precision dtype alone: prints the part of docs/sharpness.md about it.

python docs/gallery_in_half.py bfloat16
"""

from __future__ import annotations

import sys
from collections.abc import Collection

from mha.conformance.engine.judge import judge
from mha.conformance.faults.registry import FAULTS, Fault
from mha.conformance.properties.registry import needs_ranks
from mha.conformance.settings import Settings
from mha.implementations import Resolved
from mha.spec import CLAUSES

# The clauses whose directed tests see what the bound on each element does not.
DIRECTED = ("NUM-7", "GRD-8")


def fails(fault: Fault, clauses: Collection[str], dtype: str) -> bool:
    """Return whether a fault fails one of the clauses in a dtype, in the quick profile."""
    settings, resolved = Settings(profile="quick", dtypes=(dtype,), strict=True), Resolved(fault.implementation, "")
    verdicts = (judge(resolved, clause, dtype, "cpu", settings, diagnosed=False) for clause in clauses)
    return any(verdict.blocked_by or verdict.status in ("fail", "refused") for verdict in verdicts)


def main(dtype: str) -> None:
    """Judge each faulty class that claims the dtype by its own clauses about answers, then by the directed tests."""
    own: dict[type, dict[str, Fault]] = {}
    for fault in FAULTS:
        numerical = CLAUSES[fault.clause].kind == "answers" and not needs_ranks(fault.clause)
        if numerical and dtype in fault.implementation.claims.dtypes:
            own.setdefault(fault.cls, {})[fault.clause] = fault
    found: dict[str, list[str]] = {"its own clauses": [], "NUM-7 or GRD-8": [], "none of these": []}
    for clauses in own.values():
        fault = next(iter(clauses.values()))
        tried = {"its own clauses": tuple(clauses), "NUM-7 or GRD-8": DIRECTED}
        place = next((place for place, names in tried.items() if fails(fault, names, dtype)), "none of these")
        found[place].append(f"{fault.name} ({', '.join(clauses)})")
        print(place, found[place][-1], file=sys.stderr, flush=True)
    print(f"{len(own)} faulty classes give wrong answers and claim {dtype}.")
    for place, names in found.items():
        print(f"- Caught by {place}: {len(names)}" + ("" if place == "its own clauses" else f": {'; '.join(names)}"))


if __name__ == "__main__":
    main(sys.argv[1])
