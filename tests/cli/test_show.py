"""`mha show`: the failures of the last run, and the script of one of them in a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mha.conformance.cli.app import app
from mha.conformance.reports.files import save_last
from support.reports_made import two_implementations


@pytest.fixture(autouse=True)
def last_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_last(two_implementations(), tmp_path)


def show(*arguments: str) -> tuple[int, str]:
    """Run `mha show`; return its exit status and all output."""
    result = CliRunner().invoke(app, ["show", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_failures_are_listed_by_implementation() -> None:
    status, output = show()
    assert status == 0
    failing = [verdict for verdict in two_implementations().verdicts if verdict.script]
    assert f"faulty:\n\nWrong answers:\nfail            {failing[0].clause}" in output
    assert "correct:" not in output
    assert f"To see one in full: mha show {failing[0].clause}" in output
    assert " pass " not in output


def test_script_is_written_to_a_file(tmp_path: Path) -> None:
    failing = next(verdict for verdict in two_implementations().verdicts if verdict.script)
    for text in ("", "older"):
        (tmp_path / "s.py").write_text(text)
        status, output = show(failing.clause, "--script", "s.py")
        assert status == 0
        assert (
            output
            == f"The script of faulty, {failing.clause}, float32 is in 's.py'; run it: python"
            " s.py\n"
        )
        assert (tmp_path / "s.py").read_text() == failing.script
    assert {each.name for each in tmp_path.iterdir()} == {".mha", "s.py"}


def test_script_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    verdicts = two_implementations().verdicts
    clause = next(verdict.clause for verdict in verdicts if verdict.script)
    other = next(verdict.clause for verdict in verdicts if verdict.clause != clause)
    for arguments, text in (
        ((clause, "--script", str(tmp_path)), "is a folder"),
        ((clause, "--script", "nowhere/s.py"), "cannot be written"),
        ((other, "--script", "s.py"), f"{other} has no script"),
        (("--script", "s.py"), "one clause"),
    ):
        status, output = show(*arguments)
        assert (status, text in output) == (2, True), output
        assert output.startswith("mha: ")
        assert output.count("mha: ") == 1
    assert {each.name for each in tmp_path.iterdir()} == {".mha"}


def test_help_does_not_import_torch() -> None:
    code = "import sys; from mha.conformance.cli.app import app; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
