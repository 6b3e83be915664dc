"""The judge convicts what is wrong, under the clause that names the defect, and acquits what is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mha.conformance import check
from mha.conformance.faults import registry as faults
from mha.conformance.properties.registry import Property, properties

PROPERTIES = properties()
# A script that fails because of what it is itself shows nothing.
SCRIPT_BROKEN = (NameError, SyntaxError, ImportError)


def members_of(fault: faults.Fault) -> tuple[Property, ...]:
    """Return the properties of which one must catch a fault: all of its clause unless it names one."""
    return tuple(p for p in PROPERTIES[fault.clause] if fault.by in ("", p.name))


@pytest.fixture(autouse=True)
def global_state() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)


def parameters() -> Iterator[object]:
    for fault in faults.FAULTS:
        name = "-".join(filter(None, (fault.cls.__name__, fault.clause, fault.by, fault.dtype)))
        yield pytest.param(fault, id=name.removesuffix("-float32"))


@pytest.mark.parametrize("fault", list(parameters()))
def test_fault_is_caught_by_the_clause_that_names_it(fault: faults.Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    members = members_of(fault)
    assert members, fault
    monkeypatch.setattr("mha.conformance.engine.judge.properties", lambda: {fault.clause: members})
    implementation = faults.implementations[fault.cls.__name__]
    report = check(implementation, clauses=[fault.clause], dtypes=[fault.dtype], strict=True)
    (verdict,) = report.verdicts
    assert verdict.status in ("fail", "refused"), verdict
    assert not report.conforms
    assert verdict.message
    if fault.shown:
        assert verdict.script
        with pytest.raises(Exception) as shown:  # noqa: PT011  whatever the implementation raises, if it raises
            exec(compile(verdict.script, "script", "exec"), {})
        assert not isinstance(shown.value, SCRIPT_BROKEN), shown.value


def test_every_property_catches_a_fault() -> None:
    caught = {members[0].name for fault in faults.FAULTS if len(members := members_of(fault)) == 1}
    assert {p.name for members in PROPERTIES.values() for p in members} <= caught


@pytest.mark.parametrize("clause", PROPERTIES)
def test_base_of_the_faults_is_acquitted(clause: str) -> None:
    report = check(faults.correct, profile="quick", clauses=[clause], dtypes=["float32"])
    (verdict,) = report.verdicts
    assert report.conforms or verdict.status == "not_claimed", verdict
    # It is the textbook's formula, in which zero times NaN is NaN: MSK-10 says SHOULD.
    assert verdict.status in ("pass", "not_claimed") or clause == "MSK-10", verdict


# Where another dtype is another question; the rest is judged in all four by `make conformance`.
OF_DTYPES = (
    "SHP-3",
    "SMX-1",
    "SMX-2",
    "PTH-5",
    "NUM",
    "GRD-1",
    "GRD-2",
    "GRD-3",
    "GRD-4",
    "DRP-4",
    "GQA",
    "XAT",
    "INC",
)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_base_with_every_option_is_acquitted_of_everything(dtype: str) -> None:
    """Of the clauses that only recommend, too."""
    clauses = {clause for clause in PROPERTIES if dtype == "float32" or clause.startswith(OF_DTYPES)}
    report = check(faults.complete, profile="quick", dtypes=[dtype], strict=True, clauses=clauses - {"CMP-1"})
    departures = [verdict for verdict in report.verdicts if verdict.status not in ("pass", "not_claimed")]
    assert not departures
    for verdict in report.verdicts:
        of_other_dtypes = all(p.domain.dtypes and dtype not in p.domain.dtypes for p in PROPERTIES[verdict.clause])
        assert (verdict.status == "not_claimed") == of_other_dtypes, verdict


def test_every_section_of_the_gallery_is_drawn_from() -> None:
    assert len({fault.section for fault in faults.FAULTS}) >= 6
    assert len({fault.clause for fault in faults.FAULTS}) >= 12
