"""Strict runs: a SHOULD that fails is reported in any run, but only a strict one fails for it."""

from __future__ import annotations

import subprocess

import pytest

from mha.conformance import check
from mha.conformance.faults import registry as faults
from mha.conformance.reports.text import summarise
from support.folders import ROOT
from support.forks import run_module

CHECKOUT = ROOT


@pytest.mark.parametrize("strict", [False, True])
def test_a_should_is_required_only_in_a_strict_run(strict: bool) -> None:
    report = check(faults.correct, clauses=["MSK-10", "SHP-1"], dtypes=["float32"], strict=strict)
    shape, nan = report.verdicts
    assert (shape.status, nan.status, nan.level) == ("pass", "fail", "SHOULD")
    assert (shape.required, nan.required) == (True, strict)
    assert report.conforms is not strict
    _, line, *_, outcome = summarise(report.verdicts)
    assert ("DOES NOT CONFORM" if strict else "Correct: CONFORMS") in outcome
    assert "MSK-10" in line
    assert line.startswith("fail" if strict else "unmet SHOULD")


def test_a_recommendation_within_a_required_clause() -> None:
    """MSK-8 requires some declared policy, and recommends "zeros"."""
    uniform = faults.implementations["FillThatRunsOver"]
    relaxed, strict = (
        check(uniform, "quick", clauses=["MSK-8"], dtypes=["float32"], strict=strict).verdicts[0]
        for strict in (False, True)
    )
    assert (relaxed.status, relaxed.level, relaxed.conforms) == ("fail", "SHOULD", True)
    assert relaxed.message == "the declared policy is 'uniform', but should be 'zeros'"
    assert (strict.status, strict.conforms) == ("fail", False)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on MSK-10 for an implementation that fails it, a SHOULD."""
    options = (
        "--mha-impl",
        "loop",
        "-k",
        "MSK-10",
        "--mha-profile",
        "quick",
        "--mha-dtype",
        "float32",
    )
    return run_module(
        "pytest", "conformance", "-p", "no:cacheprovider", *options, *arguments, cwd=CHECKOUT
    )


def test_mha_strict_fails_a_run_under_pytest() -> None:
    strict = run("--mha-strict")
    assert strict.returncode == 1, strict.stdout
    assert "a SHOULD counts as a MUST" in strict.stdout
    assert "MSK-10 (SHOULD): " in strict.stdout
    assert "loop: DOES NOT CONFORM" in strict.stdout
