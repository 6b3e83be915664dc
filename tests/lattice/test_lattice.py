"""Right classes, in each combination of two conventions, conform; with a fault, each fails.

`make lattice` judges all of them, which takes hours of one core. Here, SAMPLE of them are judged,
each on one clause in SHARE.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

import pytest

from lattice.axes import Point, points, possible_pairs
from lattice.files import declared, inferred, misunderstood, reading, understood, write
from lattice.needs import kind_of, needed_clauses
from lattice.plants import OF_DECLARATION, PLANTS, Plant, assignment, planted
from lattice.problems import mismatches
from mha.conformance import Report, check
from mha.conformance.properties.registry import properties
from mha.implementations import Resolved
from mha.spec import CLAUSES
from support.judging import judged_throughout

pytestmark = pytest.mark.usefixtures("undiagnosed")

SAMPLE, SHARE, WRONG_SAMPLE = 8, 16, 4
# How many classes are judged, on all clauses; unset for the sample.
COUNT = os.environ.get("LATTICE", "")
SEED = int(os.environ.get("LATTICE_SEED", "0"))
CHOSEN = list(enumerate(points()))[: int(COUNT or SAMPLE)]
RESULTS = Path("build/lattice")
# Those that are given with a fault, and without a declaration.
WRONG = CHOSEN if COUNT else CHOSEN[:WRONG_SAMPLE]
every_class = pytest.mark.parametrize(
    ("number", "point"), CHOSEN, ids=[f"{number:03}" for number, _ in CHOSEN]
)


def test_every_possible_pair_is_combined() -> None:
    covered = {pair for point in points() for pair in combinations(asdict(point).items(), 2)}
    missing = [pair for pair in possible_pairs() if pair not in covered]
    assert len(points()) >= 400
    assert len(missing) <= 40, missing


@every_class
def test_class_agrees_with_the_oracle(number: int, point: Point, tmp_path: Path) -> None:
    resolved = declared(write(tmp_path, f"{number:03}", point))
    assert not mismatches(resolved.implementation)


@every_class
def test_inference_is_not_wrong(number: int, point: Point, tmp_path: Path) -> None:
    assert not misunderstood(write(tmp_path, f"{number:03}", point), point)


@pytest.mark.mostly_slow(5)
@every_class
def test_class_conforms(number: int, point: Point, tmp_path: Path) -> None:
    """Every other class is judged as it is inferred, with fewer claims, where that is possible."""
    resolved = understood(write(tmp_path, f"{number:03}", point), point, plain=number % 2 == 1)
    clauses = list(properties()) if COUNT else list(properties())[number::SHARE]
    report = judged_throughout(resolved, clauses, seed=SEED)
    _record(number, point, resolved, report)
    failed = [(v.clause, v.status, v.message, v.case) for v in report.verdicts if not v.conforms]
    assert not failed, f"{point}: {failed}"
    judged = {verdict.clause for verdict in report.verdicts if verdict.status != "not_claimed"}
    needed = needed_clauses(point) - (
        {"GRD-9"} if resolved.inference else set()
    )  # second gradients are declared
    left_out = {v.clause: v.message for v in report.verdicts if v.clause in needed - judged}
    assert not left_out, f"{point}: {left_out}"


@pytest.mark.mostly_slow(4)
@every_class
def test_planted_fault_is_caught(number: int, point: Point, tmp_path: Path) -> None:
    plant, source = planted(point)
    resolved = declared(write(tmp_path, f"{number:03}", point, source))
    assert bool(mismatches(resolved.implementation)) is plant.wrong
    verdicts = _verdicts(plant, resolved)
    assert any(status == "fail" for status, _ in verdicts.values()), (
        f"{plant.name} in {point}: {verdicts}"
    )


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize(("number", "point"), WRONG, ids=[f"{number:03}" for number, _ in WRONG])
def test_wrong_class_is_judged_as_it_is(number: int, point: Point, tmp_path: Path) -> None:
    """Undeclared, it is read as the right class is, and a clause that names its fault fails."""
    plant, source = planted(point)
    if plant.name in OF_DECLARATION:
        pytest.skip(f"{plant.name} is a convention, or of an option that is not tried")
    wrong = inferred(write(tmp_path, f"wrong_{number:03}", point, source), point)
    verdicts = _verdicts(plant, wrong) if wrong else {}
    failed = [clause for clause, (status, _) in verdicts.items() if status == "fail"]
    if COUNT:
        _keep(
            f"wrong-{number:03}",
            {"plant": plant.name, "judged": wrong is not None, "failed": failed},
        )
    assert wrong, f"{plant.name} in {point} is refused"
    right = inferred(write(tmp_path, f"right_{number:03}", point), point)
    assert right
    assert reading(wrong) == reading(right), f"{plant.name} in {point}"
    assert failed, f"{plant.name} in {point}: {verdicts}"


def _verdicts(plant: Plant, resolved: Resolved) -> dict[str, tuple[str, str]]:
    report = check(resolved, "quick", SEED, clauses=plant.clauses, dtypes=["float32"])
    return {verdict.clause: (verdict.status, verdict.message) for verdict in report.verdicts}


def test_each_fault_is_planted() -> None:
    uses = {plant.name: 0 for plant in PLANTS}
    for plant in assignment().values():
        uses[plant.name] += 1
    assert min(uses.values()) >= 10, uses
    assert {clause for plant in PLANTS for clause in plant.clauses} <= set(CLAUSES)


def _record(number: int, point: Point, resolved: Resolved, report: Report) -> None:
    """Keep what was judged of the whole lattice; `python tests/lattice/summary.py` adds it up."""
    if COUNT:
        how = "inferred" if resolved.inference else "declared"
        result = {
            "point": asdict(point),
            "kind": kind_of(point),
            "how": how,
            "report": json.loads(report.to_json()),
        }
        _keep(f"{number:03}", result)


def _keep(name: str, result: dict[str, object]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}-{SEED}.json").write_text(json.dumps(result))
