"""`mha init` and `mha list`: what is written runs, in an empty folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mha.conformance.cli.app import app

CLASSES = Path(__file__).parent / "classes"


def run(*arguments: str) -> tuple[int, str]:
    """Run `mha init`; return its status, and all that it says."""
    result = CliRunner().invoke(app, ["init", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_what_is_written_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (CLASSES / "einops_kv_fused.py").read_text()
    (tmp_path / "cross.py").write_text(text)
    status, told = run("cross.py:CrossAttention")
    assert status == 0, told
    assert told.startswith("wrote mha_declaration.py\nwrote .github/workflows/mha-conformance.yml\n")
    assert 'crossattention = "mha_declaration:implementation"' in told
    workflow = (tmp_path / ".github/workflows/mha-conformance.yml").read_text()
    command = next(line for line in workflow.splitlines() if "pytest" in line).split("run: pytest ")[1]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *command.split(), "-n", "0", "-k", "SHP-1", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CrossAttention: conforms (2 pass;" in done.stdout
    status, told = run("cross.py:CrossAttention")
    assert status == 2
    assert "there already, and is not overwritten" in told


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("sdpa", "'sdpa' is declared already; init is for a plain class"),
        ("nowhere.py:Class", "there is no file 'nowhere.py'"),
    ],
)
def test_bad_input_is_refused_in_one_line(target: str, told: str) -> None:
    status, said = run(target)
    assert status == 2
    assert told in said
    assert len(said.strip().splitlines()) == 1


def test_list_names_what_is_registered() -> None:
    result = CliRunner().invoke(app, ["list"])
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.output.splitlines()}
    assert {"loop", "sdpa", "triton"} <= set(lines)
    assert "mha.implementations.loop:implementation" in lines["loop"]
    assert "float32" in lines["loop"]
