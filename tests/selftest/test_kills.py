"""The kill matrix: what it reports for a fault, how it is counted, and how it is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mha.conformance.cli.app import app
from mha.conformance.faults import kill_matrix
from mha.conformance.faults.base import complete
from mha.conformance.faults.baselines import CHECKS, caught_by
from mha.conformance.faults.registry import FAULTS, implementations
from mha.conformance.properties.registry import properties
from mha.conformance.results import Verdict
from mha.implementations.process.torch_state import settings


def run(*arguments: str) -> tuple[int, str]:
    """Run `mha faults`; return its exit status and its output."""
    result = CliRunner().invoke(app, ["faults", *arguments])
    return result.exit_code, result.output


def test_baselines_leave_global_state_as_it_was() -> None:
    before = settings()
    for name in ("SubnormalsFlushed", "DefaultDtypeChanged", "GradientModeChanged"):
        caught_by(implementations[name], "float32")
        assert settings() == before


def test_matrix_of_two_faults_is_printed_and_written(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"kills.{kind}" for kind in ("json", "markdown")}
    options = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    status, output = run("Unscaled", "FiniteFill", "--profile", "quick", *options)
    assert status == 0, output
    assert "2 of 2 caught by the clause that must catch it" in output
    cells = json.loads(files["json"].read_text())
    assert {(cell["fault"], cell["clause"], cell["status"]) for cell in cells} == {
        ("Unscaled", "SMX-6", "fail"),
        ("FiniteFill", "MSK-8", "fail"),
    }
    assert all(
        cell["cases_to_failure"] >= 1 and cell["minimal_case_elements"] >= 1 for cell in cells
    )
    assert all(cell["case"].startswith("Case(") for cell in cells)
    assert (
        "of 2 faults and dtypes, the baseline checks catch: allclose 1, assert_close 1, grid 1"
        in output
    )
    assert "1 of 2 faults need a trigger" in output
    table = files["markdown"].read_text()
    assert (
        "](https://github.com/mlc-ai/mlc-llm/pull/3426) | The scores are not divided by"
        " sqrt(d_k). |" in table
    )
    assert "| an empty row | float32 | MSK-8 |" in table


def test_cells_are_distinct(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that several properties must catch counts once for each dtype and clause."""
    passed = Verdict(implementation="", clause="", level="MUST", dtype="", device="", status="pass")
    monkeypatch.setattr(kill_matrix, "judge", lambda *_, **__: passed)
    monkeypatch.setattr(kill_matrix, "caught_by", lambda *_: ())
    cells = [
        (kill.fault, kill.dtype, kill.clause)
        for kill in kill_matrix.kills(0, "quick", every_clause=False)
    ]
    assert len(cells) == len(set(cells))
    assert set(cells) == {(fault.name, fault.dtype, fault.clause) for fault in FAULTS}


def test_every_clause_judges_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = {
        clause: properties()[clause]
        for clause in ("SHP-1", "SMX-6", "MSK-1", "CAU-1", "HED-1", "NUM-1")
    }
    monkeypatch.setattr(kill_matrix, "properties", lambda: judged)
    kills = list(kill_matrix.kills(0, "quick", every_clause=True, names=["Unscaled"]))
    assert {kill.clause for kill in kills if kill.named} == {"SMX-6"}
    assert {"SMX-6", "NUM-1", "HED-1"} <= {kill.clause for kill in kills if kill.caught}
    assert not any(kill.caught for kill in kills if kill.clause in ("SHP-1", "MSK-1", "CAU-1"))


def test_fault_that_is_not_caught_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = replace(next(fault for fault in FAULTS if fault.name == "Unscaled"), clause="SHP-1")
    monkeypatch.setattr(kill_matrix, "FAULTS", (harmless,))
    status, output = run("--profile", "quick")
    assert status == 1
    assert "NOT CAUGHT: Unscaled by SHP-1 (pass)" in output
    assert "0 of 1 caught" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Unscald",), "there is no fault 'Unscald'; did you mean Unscaled"),
        (("--profile", "fast"), "unknown profile 'fast'"),
        (
            ("--json", "no/such/folder/kills.json"),
            "there is no folder 'no/such/folder' to write 'kills.json' in",
        ),
    ],
)
def test_bad_input_is_rejected_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    status, output = run(*arguments)
    assert status == 2
    assert message in output
    assert len(output.splitlines()) == 1


def test_full_disk_loses_no_result() -> None:
    status, output = run("Unscaled", "--profile", "quick", "--json", "/dev/full")
    assert status == 2
    assert "1 of 1 caught" in output
    assert "the matrix cannot be written to '/dev/full': No space left on device" in output


def test_baseline_checks_pass_the_base_and_fail_for_gross_faults() -> None:
    assert caught_by(complete, "float32") == ()
    assert caught_by(implementations["MeanOfValues"], "float32") == tuple(CHECKS)
    assert caught_by(implementations["NanInEmptyRow"], "float32") == ()
