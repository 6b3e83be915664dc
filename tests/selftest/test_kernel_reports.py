"""docs/kernel-reports.md: each fault that it names must be caught by a clause beside it."""

from __future__ import annotations

import re

from mha.conformance.faults.registry import FAULTS
from mha.spec import CLAUSES
from support.folders import ROOT

PAGE = (ROOT / "docs/kernel-reports.md").read_text()
ROWS = [row.strip("|").split(" | ") for row in PAGE.splitlines() if re.match(r"\| \S+[#,]", row)]


def test_each_fault_is_caught_by_a_clause_beside_it() -> None:
    caught = {(fault.cls.__name__, fault.clause) for fault in FAULTS}
    named = 0
    for report, _, clauses, rebuilt in ROWS:
        for fault in re.findall(r"`([A-Z]\w+)`", rebuilt):
            named += 1
            assert any((fault, clause) in caught for clause in clauses.split(", ")), report
    assert named > 30


def test_each_clause_is_one_of_the_contract() -> None:
    assert len(ROWS) == 41
    for report, _, clauses, _ in ROWS:
        named = re.findall(r"[A-Z]{3}-\d+", clauses)
        assert set(named) <= set(CLAUSES), report
        assert named or clauses.startswith("none"), report
