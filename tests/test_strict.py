"""Clauses that recommend: reported apart, and a failure in a strict run alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mha.conformance import check
from mha.conformance.faults import registry as faults
from mha.conformance.reports.text import summarise

CHECKOUT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_recommended_counts_in_a_strict_run_alone(strict: bool) -> None:
    report = check(faults.correct, clauses=["MSK-10", "SHP-1"], dtypes=["float32"], strict=strict)
    shape, nan = report.verdicts
    assert (shape.status, nan.status, nan.level) == ("pass", "fail", "SHOULD")
    assert (shape.required, nan.required) == (True, strict)
    assert report.conforms is not strict
    outcome, line = summarise(report.verdicts)[:2]
    assert ("DOES NOT CONFORM" if strict else "Correct: conforms (1 unmet SHOULD, 1 pass;") in outcome
    assert line.strip().startswith("fail MSK-10" if strict else "unmet SHOULD MSK-10")


def test_what_is_recommended_within_a_clause_that_is_required() -> None:
    """MSK-8 asks for any declared policy, and recommends one."""
    uniform = faults.implementations["FillThatRunsOver"]
    plain, strict = (
        check(uniform, clauses=["MSK-8"], dtypes=["float32"], strict=strict).verdicts[0] for strict in (False, True)
    )
    assert (plain.status, plain.level, plain.conforms) == ("fail", "SHOULD", True)
    assert plain.message == "the declared policy is 'uniform', but should be 'zeros'"
    assert (strict.status, strict.conforms) == ("fail", False)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    options = ("--mha-impl", "loop", "-k", "MSK-10", "--mha-profile", "quick", "--mha-dtype", "float32")
    command = [sys.executable, "-m", "pytest", "conformance", "-p", "no:cacheprovider", *options, *arguments]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=300)


def test_strict_option_fails_the_run() -> None:
    relaxed, strict = run(), run("--mha-strict")
    assert relaxed.returncode == 0, relaxed.stdout
    assert "loop: conforms (1 unmet SHOULD;" in relaxed.stdout
    assert strict.returncode == 1, strict.stdout
    assert "seed 0, SHOULD as MUST" in strict.stdout
    assert "MSK-10 (SHOULD): " in strict.stdout
    assert "loop: DOES NOT CONFORM (1 fail;" in strict.stdout
