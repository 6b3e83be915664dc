"""Every fault fails the clause that must catch it, and the correct bases of the faults pass."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest
import torch
from torch import nn

import mha.conformance.faults as package
from mha.conformance import check
from mha.conformance.engine import judge
from mha.conformance.faults import registry as faults
from mha.conformance.properties.registry import Property, needs_ranks, properties
from mha.conformance.sharding import group
from support.effort import EVERYTHING
from support.judging import RIGHT, judged, judged_throughout
from support.rank_scripts import run_on_ranks

pytestmark = pytest.mark.usefixtures("undiagnosed")

PROPERTIES = properties()
# A script that ends with one of these does not show the failure.
SCRIPT_BROKEN = (NameError, SyntaxError, ImportError)
# Unshrunk, it fails by a shape, which explains it.
SHRUNK = {"AddressTakenForInput"}
# Classes that faults are made from; each is correct, or incomplete.
BASES = {
    "Complete",
    "Correct",
    "Decoding",
    "HeadsInFloat8",
    "HeadsParallel",
    "ItemByItem",
    "Merging",
    "OnRank",
    "OutputDropped",
    "Paged",
    "SequenceParallel",
    "SoftmaxOfInfinity",
    "Varlen",
    "WeightsAndOutputDropped",
}


def members_of(fault: faults.Fault) -> tuple[Property, ...]:
    """Return the properties of which one must catch a fault: all of its clause, or a named one."""
    return tuple(p for p in PROPERTIES[fault.clause] if fault.caught_by in ("", p.name))


@pytest.fixture(autouse=True)
def global_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(
        group, "TIMEOUT", 8.0
    )  # the ranks have little to do, and one fault waits that long
    yield
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)


def parameters() -> Iterator[object]:
    tried = set[tuple[str, str]]()
    for fault in faults.FAULTS:
        name = "-".join(filter(None, (fault.name, fault.clause, fault.caught_by, fault.dtype)))
        slow = all(prop.slow for prop in members_of(fault)) and not EVERYTHING
        marks = [pytest.mark.skip(reason="`make lattice` waits for a compiler")] if slow else []
        # `mha faults` and `make lattice` try all of them; here each property has one.
        marks += [pytest.mark.slow] if (fault.clause, fault.caught_by) in tried else []
        tried.add((fault.clause, fault.caught_by))
        yield pytest.param(fault, id=name.removesuffix("-float32"), marks=marks)


@pytest.mark.parametrize("fault", list(parameters()))
def test_fault_fails_the_clause_that_must_catch_it(
    fault: faults.Fault,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if fault.name not in SHRUNK:
        request.getfixturevalue("unshrunk")
    members = members_of(fault)
    assert members, fault
    monkeypatch.setattr(judge, "properties", lambda: {fault.clause: members})
    report = check(fault.implementation, clauses=[fault.clause], dtypes=[fault.dtype], strict=True)
    (verdict,) = report.verdicts
    assert verdict.status in ("fail", "refused"), verdict
    assert verdict.blocked_by is None, verdict
    assert not report.conforms
    assert verdict.message
    if fault.script_shows:
        assert verdict.script
        if needs_ranks(fault.clause):
            ended = run_on_ranks(verdict.script, tmp_path)
            assert ended
            assert not any(f"\n{error.__name__}: " in ended for error in SCRIPT_BROKEN), ended
            return
        with pytest.raises(Exception) as raised:  # noqa: PT011  whatever the implementation raises, if it raises
            exec(compile(verdict.script, "script", "exec"), {})
        assert not isinstance(raised.value, SCRIPT_BROKEN), raised.value


def test_every_property_catches_a_fault() -> None:
    caught = {members[0].name for fault in faults.FAULTS if len(members := members_of(fault)) == 1}
    assert {p.name for members in PROPERTIES.values() for p in members} <= caught


def test_every_faulty_class_is_registered() -> None:
    registered = {fault.cls for fault in faults.FAULTS}
    for module in iter_modules([str(Path(str(package.__file__)).parent)]):
        loaded = import_module(f"{package.__name__}.{module.name}")
        for name, cls in vars(loaded).items():
            if module.name.startswith("hostile"):  # which tests/harness/test_hostile.py has
                continue
            if (
                isinstance(cls, type)
                and issubclass(cls, nn.Module)
                and cls.__module__ == loaded.__name__
            ):
                assert (cls in registered) != (name in BASES), name


def test_each_fault_names_a_property_of_its_clause() -> None:
    assert [(fault.name, fault.caught_by) for fault in faults.FAULTS if not members_of(fault)] == []


def test_cells_are_distinct_and_in_the_order_of_the_contract() -> None:
    cells = [(fault.name, fault.dtype, fault.clause, fault.caught_by) for fault in faults.FAULTS]
    assert len(cells) == len(set(cells))
    clauses = list(dict.fromkeys(fault.clause for fault in faults.FAULTS))
    assert clauses == sorted(clauses, key=list(PROPERTIES).index)
    names = {name for name, *_ in cells}
    classes = {fault.cls for fault in faults.FAULTS}
    assert len(names) == len(classes)


def test_each_fault_is_in_the_module_of_one_of_its_clauses() -> None:
    """A module of faults names its clauses in the first paragraph, if it is of any."""
    homes = {
        fault.cls: fault.cls.__module__
        for fault in faults.FAULTS
        if not fault.cls.__module__.endswith((".tutorials", ".reported"))
    }
    for cls, module in homes.items():
        heading = str(import_module(module).__doc__).partition("\n\n")[0]
        families = {fault.clause[:3] for fault in faults.FAULTS if fault.cls is cls}
        assert any(family in heading for family in families), cls


def test_decorators_of_a_class_share_its_implementation() -> None:
    for fault in faults.FAULTS:
        module = vars(import_module(fault.cls.__module__))
        assert (
            module[f"faulty_{fault.name}"]
            is fault.implementation
            is faults.implementations[fault.name]
        )


def test_plain_base_of_the_faults_passes() -> None:
    """It is the textbook formula, in which zero times NaN is NaN: MSK-10 is a SHOULD."""
    report = judged(faults.correct, [], RIGHT)
    assert report.conforms
    violated = {v.clause for v in report.verdicts if v.status not in ("pass", "not_claimed")}
    assert violated <= {"MSK-10"}


# Clauses for which the dtype matters; `make conformance` judges the others in all four.
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


NOT_CLAIMED = (
    *("MEM-1", "VAL-1", "LSE-1", "LSE-2", "LSE-3", "ALB-2", "DET-2"),
    *("PAK-1", "PAK-2", "PAK-3", "PAK-4", "ROT-1", "QKN-1"),
)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_complete_base_of_the_faults_passes_every_clause(dtype: str) -> None:
    """Those of level SHOULD and MAY as well."""
    without_ranks = (clause for clause in PROPERTIES if not needs_ranks(clause))
    clauses = {
        clause for clause in without_ranks if dtype == "float32" or clause.startswith(OF_DTYPES)
    }
    report = judged_throughout(faults.complete, clauses - {"CMP-1"}, dtypes=[dtype], strict=True)
    failures = [
        verdict for verdict in report.verdicts if verdict.status not in ("pass", "not_claimed")
    ]
    assert not failures
    for verdict in report.verdicts:
        if verdict.clause in (
            "STA-9",
            "CFG-7",
            *NOT_CLAIMED,
        ):  # it has no layers, and no constructor of its own
            continue
        of_other_dtypes = all(
            p.domain.dtypes and dtype not in p.domain.dtypes for p in PROPERTIES[verdict.clause]
        )
        assert (verdict.status == "not_claimed") == of_other_dtypes, verdict


def test_every_fault_says_what_is_wrong() -> None:
    for fault in faults.FAULTS:
        assert fault.defect.endswith("."), fault.cls


def test_at_least_a_third_of_the_faults_need_a_trigger() -> None:
    triggers = {fault.cls: fault.trigger for fault in faults.FAULTS}
    assert len(triggers) >= 110
    assert sum(map(bool, triggers.values())) >= len(triggers) / 3
