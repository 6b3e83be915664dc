"""A script: judge groups of clauses, each in a process that has judged nothing before.

Usage: python judged_in_order.py TARGET CLAUSE,CLAUSE,... CLAUSE,... It prints a list of verdicts
for each group.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from mha.conformance import check
from mha.implementations import Resolved, resolve


def judged(resolved: Resolved, clauses: list[str]) -> list[dict[str, Any]]:
    """Return the verdicts on the clauses, judged in this order."""
    reports = (check(resolved, "quick", clauses=[clause], dtypes=["float32"]) for clause in clauses)
    return [asdict(verdict) for report in reports for verdict in report.verdicts]


def judged_in_a_child(resolved: Resolved, clauses: list[str]) -> list[dict[str, Any]]:
    """Return the same from a fork of this process, which has imported everything."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writer, "w") as file:
            json.dump(judged(resolved, clauses), file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text)  # type: ignore[no-any-return]  # a list


if __name__ == "__main__":
    target, *groups = sys.argv[1:]
    implementation = resolve(target)[0]
    print(json.dumps([judged_in_a_child(implementation, group.split(",")) for group in groups]))
