"""The script of a failure on ranks: it finds what the judge found, in processes of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mha.conformance import check
from mha.conformance.cases.case import Case
from mha.conformance.faults import registry
from mha.conformance.harness.errors import Violation
from mha.conformance.harness.recording import RecordedTensor
from mha.conformance.harness.session import Session
from mha.conformance.scripts.literals import literal
from mha.conformance.scripts.reproduction import script
from mha.conformance.sharding.gathered import in_larger_group
from mha.implementations import ring, tensor_parallel
from mha.spec import Sharded
from support import rank_functions
from support.rank_scripts import run_on_ranks

CASE = Case(n_heads=2, head_dim=2, B=2, L=4, S=8, ranks=2, seed=1)


def equality(found: RecordedTensor) -> str:
    """Return the line that compares a tensor with its bits."""
    return (
        f"torch.testing.assert_close({found.code}, {literal(found.tensor)}, rtol=0, atol=0,"
        " equal_nan=True)"
    )


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize(
    ("implementation", "case"),
    [
        (ring.implementation, replace(CASE, mask="bias")),
        (ring.implementation, replace(CASE, L=1, S=5, mask="keys", seed=3)),
        (ring.zigzag, replace(CASE, inputs="self", S=4, causal=True)),
        (ring.striped, replace(CASE, L=3, S=3, values="low", dtype="bfloat16", ranks=3)),
        (rank_functions.keys_everywhere, replace(CASE, mask="bias")),
        (rank_functions.keys_everywhere, replace(CASE, inputs="self", S=4)),
        (tensor_parallel.implementation, replace(CASE, inputs="self", S=4, mask="bias")),
        (tensor_parallel.implementation, replace(CASE, n_heads=1, ranks=1, bias=False)),
    ],
)
def test_script_finds_the_numbers_of_the_judge(
    implementation: Sharded, case: Case, tmp_path: Path
) -> None:
    session, problem = Session(implementation, case), case.problem()
    output = session(problem, mode="no_grad").output
    gradients = session.gradients(problem, session.upstream(problem))
    assert ("mask" in gradients) == (case.mask == "bias")
    lines = tuple(map(equality, (output, *gradients.values())))
    text = script(session, "DST-2", Violation("off", lines))
    assert text
    assert run_on_ranks(text, tmp_path) == ""
    off = equality(replace(output, tensor=output.tensor + 1))
    assert "Tensor-likes are not equal" in run_on_ranks(text.replace(lines[0], off), tmp_path)


def test_script_has_a_mesh_in_a_larger_group(tmp_path: Path) -> None:
    session, problem = Session(ring.implementation, CASE), CASE.problem()
    larger = session.derive(session.built(problem), in_larger_group, "{}.in_larger_group()")
    output = session(problem, via=larger).output
    text = script(
        session, "DST-9", Violation("off", (equality(output), "assert dist.get_rank() == rank + 1"))
    )
    assert text
    assert run_on_ranks(text, tmp_path) == ""


@pytest.mark.parametrize("implementation", [rank_functions.short_part, rank_functions.short_output])
def test_script_shows_an_output_of_another_shape(implementation: Sharded, tmp_path: Path) -> None:
    (verdict,) = check(implementation, "quick", clauses="DST-1", dtypes=torch.float32).verdicts
    assert verdict.script
    assert "AssertionError: torch.Size" in run_on_ranks(verdict.script, tmp_path)


@pytest.mark.parametrize(
    ("clause", "name", "correct"),
    [
        ("DST-1", "SummedOnTheFirstRank", "mha.conformance.faults.ranks import heads_parallel"),
        (
            "DST-2",
            "GatheredWithoutGradients",
            "mha.conformance.faults.ranks import sequence_parallel",
        ),
        ("DST-5", "MaskCutInOrder", "mha.implementations.ring import zigzag"),
    ],
)
def test_script_fails_with_the_fault_alone(
    clause: str, name: str, correct: str, tmp_path: Path
) -> None:
    """With a correct implementation in its place, it ends."""
    (verdict,) = check(
        registry.implementations[name], clauses=[clause], dtypes=torch.float32
    ).verdicts
    assert verdict.script
    assert "mha.conformance.sharding" not in verdict.script
    assert "AssertionError: " in run_on_ranks(verdict.script, tmp_path)
    faulty = f"from mha.conformance.faults.sharding import faulty_{name} as"
    assert faulty in verdict.script
    assert run_on_ranks(verdict.script.replace(faulty, f"from {correct} as"), tmp_path) == ""


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("off", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_script_runs_as_a_program(off: int, tmp_path: Path) -> None:
    """It starts the ranks itself, and ends with them: with an error, or without one."""
    session = Session(ring.zigzag, CASE)
    output = session(CASE.problem()).output
    found = replace(output, tensor=output.tensor + off)
    text = script(session, "DST-1", Violation("off", (equality(found),)))
    assert text
    (tmp_path / "alone.py").write_text(text)
    command = [sys.executable, tmp_path / "alone.py"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == off, ended.stderr
    assert ("AssertionError: " in ended.stderr) == bool(off)
