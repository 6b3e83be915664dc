"""`mha init` and `mha list`: the files that init writes run in an empty folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mha.conformance.cli import list as listing
from mha.conformance.cli.app import app
from mha.implementations import Registered

CLASSES = Path(__file__).parent / "classes"


def run(*arguments: str) -> tuple[int, str]:
    """Run `mha`; return its exit status and all output."""
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_written_files_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cross.py").write_text((CLASSES / "einops_kv_fused.py").read_text())
    status, output = run("init", "cross.py:CrossAttention")
    assert status == 0, output
    assert output.startswith("wrote mha_declaration.py\nwrote .github/workflows/mha-conformance.yml\n")
    assert 'crossattention = "mha_declaration:implementation"' in output
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
    assert "CrossAttention: conforms (1 clause judged" in done.stdout
    status, output = run("init", "cross.py:CrossAttention")
    assert status == 2
    assert "would be overwritten" in output


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("sdpa", "'sdpa' is already declared; init takes a plain class"),
        ("nowhere.py:Class", "there is no file 'nowhere.py'"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(target: str, message: str) -> None:
    status, output = run("init", target)
    assert status == 2
    assert message in output
    assert len(output.strip().splitlines()) == 1


def test_list_names_registered_implementations() -> None:
    status, output = run("list")
    assert status == 0
    lines = {line.split()[0]: line for line in output.splitlines()}
    assert {"loop", "sdpa", "triton"} <= set(lines)
    assert "mha.implementations.loop:implementation" in lines["loop"]
    assert "float32" in lines["loop"]


def test_list_of_a_broken_plugin_has_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Registered("plugin", "plugin:implementation", error="RuntimeError: no library", broken=True)
    monkeypatch.setattr(listing, "discover", lambda: [broken])
    status, output = run("list")
    assert status == 2
    assert output.rstrip().endswith("unavailable: RuntimeError: no library")
