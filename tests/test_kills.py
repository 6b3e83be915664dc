"""The kill matrix: what it says of a fault, and how it is written."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from mha.conformance.cli.app import app
from mha.conformance.faults import gallery, kill_matrix
from mha.conformance.faults.baselines import CHECKS, caught_by
from mha.conformance.faults.gallery import FAULTS
from mha.conformance.properties.registry import properties


def run(*arguments: str) -> tuple[int, str]:
    """Run `mha faults`; return its status, and all that it says."""
    result = CliRunner().invoke(app, ["faults", *arguments])
    return result.exit_code, result.output


def test_matrix_of_two_faults_is_told_and_written(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"kills.{kind}" for kind in ("json", "markdown", "svg")}
    options = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    status, told = run("Unscaled", "FiniteFill", "--profile", "quick", *options)
    assert status == 0, told
    assert "2 of 2 caught by the clause that names the defect" in told
    cells = json.loads(files["json"].read_text())
    assert {(cell["fault"], cell["clause"], cell["status"]) for cell in cells} == {
        ("Unscaled", "SMX-6", "fail"),
        ("FiniteFill", "MSK-8", "fail"),
    }
    assert all(cell["first"] >= 1 and cell["size"] >= 1 and cell["case"].startswith("Case(") for cell in cells)
    assert (
        "usual checks catch, of the same 2 (some faults are in two dtypes): allclose 1, assert_close 1, grid 1" in told
    )
    assert "1 of 2 faults show only at a coincidence" in told
    table = files["markdown"].read_text()
    assert "](https://github.com/mlc-ai/mlc-llm/pull/3426) | The scores are not divided by sqrt(d_k). |" in table
    assert "| an empty row | float32 | MSK-8 |" in table
    drawn = ElementTree.fromstring(files["svg"].read_text())
    assert len(drawn.findall("{*}rect")) == 1 + 2 + 3  # the ground, a square for each, and the usual checks' of one


def test_every_clause_is_asked_where_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {clause: properties()[clause] for clause in ("SHP-1", "SMX-6", "MSK-1", "CAU-1", "HED-1", "NUM-1")}
    monkeypatch.setattr(kill_matrix, "properties", lambda: asked)
    found = list(kill_matrix.kills(0, "quick", every_clause=True, names=["Unscaled"]))
    assert {kill.clause for kill in found if kill.named} == {"SMX-6"}
    assert {"SMX-6", "NUM-1", "HED-1"} <= {kill.clause for kill in found if kill.caught}
    assert not any(kill.caught for kill in found if kill.clause in ("SHP-1", "MSK-1", "CAU-1"))
    assert kill_matrix.to_svg(found).count("<circle") == sum(kill.caught for kill in found) - 1


def test_fault_that_is_not_caught_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = next(fault for fault in FAULTS if fault.cls.__name__ == "Unscaled")._replace(clause="SHP-1")
    monkeypatch.setattr(kill_matrix, "FAULTS", (harmless,))
    status, told = run("--profile", "quick")
    assert status == 1
    assert "NOT CAUGHT: Unscaled by SHP-1 (pass)" in told
    assert "0 of 1 caught" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("Unscald",), "there is no fault 'Unscald'; did you mean Unscaled"),
        (("--profile", "fast"), "there is no profile 'fast'"),
        (("--json", "no/such/folder/kills.json"), "there is no folder 'no/such/folder' to write 'kills.json' in"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments: tuple[str, ...], told: str) -> None:
    status, said = run(*arguments)
    assert status == 2
    assert told in said
    assert len(said.splitlines()) == 1


def test_full_disk_loses_nothing_that_was_found() -> None:
    status, told = run("Unscaled", "--profile", "quick", "--json", "/dev/full")
    assert status == 2
    assert "1 of 1 caught" in told
    assert "the matrix cannot be written to '/dev/full': No space left on device; what was found stands above" in told


def test_usual_checks_let_the_base_pass_and_stop_what_is_plainly_wrong() -> None:
    assert caught_by(gallery.complete, "float32") == ()
    assert caught_by(gallery.implementations["MeanOfValues"], "float32") == tuple(CHECKS)
    assert caught_by(gallery.implementations["NanInEmptyRow"], "float32") == ()


def test_at_least_a_third_of_the_faults_show_only_at_a_coincidence() -> None:
    classes = {fault.cls for fault in FAULTS}
    assert len(classes) >= 110
    assert sum("only" in vars(cls) for cls in classes) >= len(classes) / 3


def test_every_fault_says_what_is_wrong() -> None:
    for fault in FAULTS:
        told = vars(fault.cls).get("__doc__")
        assert told, fault.cls
        assert told.strip().endswith("."), fault.cls
