"""The commands of the tutorial and of the guides print what these pages show."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mha.conformance.cli.app import app
from support.documents import blocks, in_six_digits

# How many outputs each page shows.
PAGES = {"tutorial": 4, "how-to/kernel": 2, "how-to/class": 1, "how-to/plugin": 1}


@pytest.mark.parametrize("page", PAGES)
def test_commands_print_what_the_page_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output, files, compared = "", [], 0
    for label, text in blocks(f"docs/{page}.md"):
        if label.startswith("file "):
            files.append(Path(label.removeprefix("file ")))
            files[-1].write_text(text)
        elif label == "command":
            output = in_six_digits(CliRunner().invoke(app, text.split()[1:]).output)
        else:
            assert in_six_digits(text.rstrip("\n")) in output, output
            compared += 1
    assert compared == PAGES[page]
    for file in files:
        sys.modules.pop(file.stem, None)
