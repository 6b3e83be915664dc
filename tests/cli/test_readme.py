"""The example of the README is judged as the README shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mha.conformance import settings
from mha.conformance.cli.app import app
from mha.conformance.faults.registry import FAULTS
from support.documents import blocks, in_six_digits
from support.folders import ROOT

# One whose answers are wrong, two of advice, and another one.
CLAUSES = ("SHP-8", "MSK-1", "MSK-4", "MSK-12")


def test_example_is_inferred_and_fails_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    some = {
        clause: members for clause, members in settings.properties().items() if clause in CLAUSES
    }
    monkeypatch.setattr(settings, "properties", lambda: some)
    several = CliRunner().invoke(app, arguments)
    cause = "masked scores get a finite number, which is not low enough"
    assert f"MyAttention: DOES NOT CONFORM: 1 of 2 answers is wrong (MSK-1): {cause}" in " ".join(
        several.output.split()
    )
    assert summary.startswith(f"Wrong answers:\nfail            MSK-1, SMX-4 float32: {cause}\n")
    # What the whole run prints of these clauses is what this one does.
    for line in several.output.splitlines():
        if line.startswith("unmet SHOULD"):
            assert line in summary.splitlines()


def test_number_of_faults_is_that_of_the_gallery_in_hundreds() -> None:
    hundreds = len({fault.cls for fault in FAULTS}) // 100 * 100
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"has more than {hundreds} faulty implementations" in readme
