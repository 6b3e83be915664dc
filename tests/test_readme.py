"""The example of the README is judged as the README shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from documents import blocks, in_six_digits
from typer.testing import CliRunner

from mha.conformance import settings
from mha.conformance.cli.app import app
from mha.conformance.faults.registry import FAULTS

ROOT = Path(__file__).resolve().parent.parent
# Three that fail, and another one.
CLAUSES = ("SHP-6", "MSK-1", "MSK-4", "MSK-12")


def test_example_is_inferred_and_fails_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    by_label: dict[str, list[str]] = {}
    for label, text in blocks("README.md"):
        by_label.setdefault(label, []).append(in_six_digits(text) if label == "output" else text)
    (source,), (command,) = by_label["my_attention.py"], by_label["command"]
    inference, summary, failure = by_label["output"]
    Path("my_attention.py").write_text(source)
    arguments = command.split()[1:]
    in_full = CliRunner().invoke(app, [*arguments, "--clause", "MSK-1"])
    assert in_full.exit_code == 1, in_full.output
    assert inference in in_full.output
    assert failure in in_six_digits(in_full.output)
    some = {clause: members for clause, members in settings.properties().items() if clause in CLAUSES}
    monkeypatch.setattr(settings, "properties", lambda: some)
    several = CliRunner().invoke(app, arguments)
    assert "MyAttention: DOES NOT CONFORM in answers and refusals (4 clauses judged" in several.output
    assert "    answers 1 of 2; refusals 0 of 2\n" in several.output
    assert summary.startswith("MyAttention: DOES NOT CONFORM in answers and refusals (")


def test_number_of_faults_is_that_of_the_gallery() -> None:
    classes = {fault.cls for fault in FAULTS}
    assert f"has {len(classes)} faulty implementations" in (ROOT / "README.md").read_text(encoding="utf-8")
