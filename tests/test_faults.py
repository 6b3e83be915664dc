"""The judge convicts what is wrong, under the clause that names the defect, and acquits what is right."""

from __future__ import annotations

import pytest

import faults
from mha.conformance import check
from mha.conformance.registry import properties


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.cls.__name__)
def test_fault_is_caught_by_the_clause_that_names_it(fault: faults.Fault) -> None:
    implementation = faults.implementations[fault.cls.__name__]
    report = check(implementation, clauses=[fault.clause], dtypes=[fault.dtype])
    (verdict,) = report.verdicts
    assert verdict.status == "fail", verdict
    assert not report.conforms
    assert verdict.message
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        exec(compile(verdict.script, "script", "exec"), {})


@pytest.mark.parametrize("clause", properties())
def test_base_of_the_faults_is_acquitted(clause: str) -> None:
    report = check(faults.correct, profile="quick", clauses=[clause], dtypes=["float32"])
    assert {verdict.status for verdict in report.verdicts} <= {"pass", "not_claimed"}, report.verdicts


def test_every_section_of_the_gallery_is_drawn_from() -> None:
    assert len({fault.section for fault in faults.FAULTS}) >= 6
    assert len({fault.clause for fault in faults.FAULTS}) >= 12
