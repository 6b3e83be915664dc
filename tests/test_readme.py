"""The README's example is judged as the README says, to the letter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mha.conformance import checking
from mha.conformance.cli.app import app

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
# The three that do not let it pass, and one more.
CLAUSES = ("SHP-6", "MSK-1", "MSK-8", "MSK-12")


def blocks(label: str) -> list[str]:
    """Return the code blocks that follow a comment."""
    return re.findall(rf"<!-- {re.escape(label)} -->\n```\w*\n(.*?)```", README, flags=re.DOTALL)


def test_example_is_understood_and_fails_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_attention.py").write_text(*blocks("my_attention.py"))
    (command,) = blocks("command")
    arguments = command.split()[1:]
    understood, failure, summary = blocks("output")
    in_full = CliRunner().invoke(app, [*arguments, "--clause", "MSK-8"])
    assert in_full.exit_code == 1, in_full.output
    assert understood in in_full.output
    assert failure in in_full.output
    some = {clause: members for clause, members in checking.properties().items() if clause in CLAUSES}
    monkeypatch.setattr(checking, "properties", lambda: some)
    whole = CliRunner().invoke(app, arguments)
    assert "MyAttention: DOES NOT CONFORM (3 fail, 1 pass;" in whole.output
    assert summary.startswith("MyAttention: DOES NOT CONFORM (3 fail, 1 unmet SHOULD,")
