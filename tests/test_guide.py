"""The guide's commands print what the guide says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mha.conformance.cli.app import app

GUIDE = (Path(__file__).resolve().parent.parent / "docs" / "guide.md").read_text()
BLOCK = re.compile(r"<!-- (.+?) -->\n```\w*\n(.*?)```", re.DOTALL)


def in_six_digits(text: str) -> str:
    """Round long numbers: the last digits of a float32 result differ from processor to processor."""
    return re.sub(r"-?\d+\.\d{6,}", lambda number: f"{float(number[0]):.6g}", text)


def test_every_command_prints_what_the_guide_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said, compared = "", 0
    for label, text in BLOCK.findall(GUIDE):
        if label.startswith("file "):
            Path(label.removeprefix("file ")).write_text(text)
        elif label == "command":
            said = in_six_digits(CliRunner().invoke(app, text.split()[1:]).output)
        else:
            assert in_six_digits(text.rstrip("\n")) in said, said
            compared += 1
    assert compared == 6
    for name in ("gpt", "kernel", "fixed", "padded"):
        sys.modules.pop(name, None)
