"""Right classes, in each combination of two conventions, conform; with a fault, each fails.

`make lattice` judges all of them, which takes hours of one core. Here, a sample of them is judged,
each on one clause in SHARE.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

import pytest

from lattice.assignment import (
    OF_DECLARATION,
    assignment,
    is_about_heads,
    planted,
)
from lattice.axes import HEAD_POINTS, PLAIN_POINTS, Point, head_pairs, points, possible_pairs
from lattice.files import declared, inferred, misunderstood, reading, understood, write
from lattice.needs import OF_DECODING, kind_of, needed_clauses
from lattice.plants import PLANTS, Plant
from lattice.problems import mismatches
from mha.conformance import Report, check
from mha.conformance.properties.registry import properties
from mha.implementations import Resolved
from mha.spec import CLAUSES
from support.judging import judged_throughout

pytestmark = pytest.mark.usefixtures("undiagnosed")

# How many classes are judged, on all clauses, or which, as in "400-459"; unset for a sample.
COUNT = os.environ.get("LATTICE", "")
SEED = int(os.environ.get("LATTICE_SEED", "0"))
# Each class of the sample is judged on one clause in so many.
SHARE = 16
# How many points the sample has of those without `HEAD_AXES`, and of the others, of which the last
# one is taken: it has a rotation, a norm and a window.
PLAIN_SAMPLE, HEAD_SAMPLE = 8, 2
RESULTS = Path("build/lattice")
# Of what becomes of queries and keys, which inference reads only where it is right.
OF_HEADS = ("ROT-1", "QKN-1")
# Second gradients and decoding are declared, and not inferred.
DECLARED_ONLY = {"GRD-9", *OF_DECODING}


def _chosen() -> dict[int, tuple[Point, Plant]]:
    """Return the points that are judged, and the fault of each, by their numbers."""
    sizes = (PLAIN_POINTS, HEAD_POINTS) if COUNT else (PLAIN_SAMPLE, HEAD_SAMPLE)
    plants = list(assignment(*sizes).items())
    if not COUNT:
        chosen = dict(enumerate(plants[:PLAIN_SAMPLE]))
        return chosen | {PLAIN_POINTS + HEAD_SAMPLE - 1: plants[-1]}
    first, _, last = COUNT.rpartition("-")
    start, end = int(first or 0), int(last) + bool(first)
    return dict(list(enumerate(plants))[start:end])


CHOSEN = _chosen()


def every_class(sample: int = PLAIN_SAMPLE, *, with_heads: bool = True) -> pytest.MarkDecorator:
    """Try a test on all chosen classes, or on so many of the plain ones in the sample.

    with_heads: and on the one that has a rotation, a norm and a window.
    """
    numbers = []
    for number in CHOSEN:
        in_sample = number < sample or (with_heads and number >= PLAIN_POINTS)
        if COUNT or in_sample:
            numbers.append(number)
    return pytest.mark.parametrize("number", numbers, ids=[f"{number:03}" for number in numbers])


def test_every_possible_pair_is_combined() -> None:
    covered = {pair for point in points() for pair in combinations(asdict(point).items(), 2)}
    missing = [pair for pair in possible_pairs() if pair not in covered]
    assert len(points()) == PLAIN_POINTS + HEAD_POINTS
    assert len(missing) <= 40, missing
    missing = [pair for pair in head_pairs() if pair not in covered]
    assert len(missing) <= 60, missing


@every_class()
def test_class_agrees_with_the_oracle(number: int, tmp_path: Path) -> None:
    point, _ = CHOSEN[number]
    resolved = declared(write(tmp_path, f"{number:03}", point))
    assert not mismatches(resolved.implementation)


@every_class()
def test_inference_is_not_wrong(number: int, tmp_path: Path) -> None:
    point, _ = CHOSEN[number]
    assert not misunderstood(write(tmp_path, f"{number:03}", point), point)


@every_class(5, with_heads=False)
def test_class_conforms(number: int, tmp_path: Path) -> None:
    """Every other class is judged as it is inferred, with fewer claims, where that is possible."""
    point, _ = CHOSEN[number]
    resolved = understood(write(tmp_path, f"{number:03}", point), point, plain=number % 2 == 1)
    clauses = list(properties()) if COUNT else list(properties())[number::SHARE]
    report = judged_throughout(resolved, clauses, seed=SEED)
    _record(number, point, resolved, report)
    failed = [(v.clause, v.status, v.message, v.case) for v in report.verdicts if not v.conforms]
    assert not failed, f"{point}: {failed}"
    judged = {verdict.clause for verdict in report.verdicts if verdict.status != "not_claimed"}
    needed = needed_clauses(point)
    if resolved.inference:
        needed -= DECLARED_ONLY
    left_out = {v.clause: v.message for v in report.verdicts if v.clause in needed - judged}
    assert not left_out, f"{point}: {left_out}"


@every_class(4)
def test_planted_fault_is_caught(number: int, tmp_path: Path) -> None:
    point, plant = CHOSEN[number]
    resolved = declared(write(tmp_path, f"{number:03}", point, planted(point, plant)))
    assert bool(mismatches(resolved.implementation)) is plant.wrong
    verdicts = _verdicts(plant, resolved)
    assert any(status == "fail" for status, _ in verdicts.values()), (
        f"{plant.name} in {point}: {verdicts}"
    )


@pytest.mark.parametrize("fault", ["frequencies_in_bfloat16", "positions_in_bfloat16"])
def test_rounded_angles_are_seen_without_the_judge(fault: str, tmp_path: Path) -> None:
    point = Point(inputs="x", rotary="half", part="quarter", tables="inv_freq", softmax="float32")
    (plant,) = (each for each in PLANTS if each.name == fault)
    resolved = declared(write(tmp_path, fault, point, planted(point, plant)))
    assert mismatches(resolved.implementation)


@every_class(2, with_heads=False)
def test_wrong_class_is_judged_as_it_is(number: int, tmp_path: Path) -> None:
    """Undeclared, it is read as the right class is, and a clause that names its fault fails."""
    point, plant = CHOSEN[number]
    if plant.name in OF_DECLARATION:
        pytest.skip(f"{plant.name} is a convention, or of an option that is not tried")
    if plant.clauses[0] in OF_HEADS:
        pytest.skip(f"undeclared, a class with {plant.name} is refused, or read another way")
    source = planted(point, plant)
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
    for plant in PLANTS:
        assert uses[plant.name] >= (5 if is_about_heads(plant) else 10), uses
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
