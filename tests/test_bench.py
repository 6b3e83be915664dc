"""`mha bench`: its table and its files, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from test_speed import SIZES, VECTORIZED, Changed
from typer.testing import CliRunner

from mha.conformance.benchmarks import work
from mha.conformance.cli import bench as benching
from mha.conformance.cli.app import app
from mha.conformance.results import Report, Verdict
from mha.spec import Implementation


def report_on(implementation: Implementation, *_: Any) -> Report:
    """Stands for the judge: `loop` fails."""
    status: Any = "fail" if implementation.name == "loop" else "pass"
    told: Any = {"implementation": implementation.name, "clause": "MSK-1", "level": "MUST", "required": True}
    verdict = Verdict(**told, dtype="float32", device="cpu", status=status)
    return Report(verdicts=(verdict,), profile="quick", seed=0, versions={}, targets={implementation.name: "x"})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for module in (benching, work):
        monkeypatch.setattr(module, "SHAPES", {"encoder": SIZES})
    monkeypatch.setattr(benching, "USUAL", ("encoder",))
    monkeypatch.setattr(benching, "SWEEP", (8, 16))
    monkeypatch.setattr(benching, "report_on", report_on)
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


@pytest.mark.usefixtures("small")
def test_table_and_files_tell_the_same() -> None:
    arguments = ["bench", "sdpa", "flex", "loop", "--rounds", "6", "--threads", "1", "--to", "t.json", "--to", "t.html"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1, done.output
    assert (
        "loop is not timed: it does not conform (MSK-1); see mha check loop --dtype float32 --device cpu" in done.output
    )
    assert "encoder, inference, float32 on cpu, 1 thread\n" in done.output
    assert "flex                     not timed: it does not claim gradients" in done.output
    rows = json.loads(Path("t.json").read_text())
    assert [(row["implementation"], row["work"]["training"], row["wrong"]) for row in rows] == [
        ("sdpa", False, ""),
        ("flex", False, ""),
        ("flex", True, "it does not claim gradients"),
        ("sdpa", True, ""),
    ]
    assert f"{1e3 * median(rows[0]['seconds']):9.2f}    1.00     [1.00, 1.00]" in done.output
    page = Path("t.html").read_text()
    assert "1 of 2 implementations conform" not in page
    assert "2 of 3 implementations conform" in page
    assert f"<td>{1e3 * median(rows[0]['seconds']):.2f}</td><td>1.00</td>" in page
    assert "<figure>" not in page


@pytest.mark.usefixtures("small")
def test_growing_lengths_are_drawn() -> None:
    arguments = ["bench", "sdpa", "minimal", "--sweep", "--rounds", "6", "--to", "s.svg", "--to", "s.html"]
    swept = CliRunner().invoke(app, arguments)
    assert swept.exit_code == 0, swept.output
    assert Path("s.svg").read_text().strip() in Path("s.html").read_text()
    drawn = ElementTree.parse("s.svg").getroot()
    assert {"sdpa", "minimal", "time in ms, against length", "8", "16", "100%"} <= {
        text.text for text in drawn.findall(".//{*}text")
    }


BAD_INPUT = {
    "an unknown shape": (("--shape", "decoder"), "no shape 'decoder'; known are encoder"),
    "an unknown target": (("no_such",), "'no_such'"),
    "two of one name": (("test_bench:twin",), "two implementations are named 'sdpa'"),
    "an unknown dtype": (("--dtype", "float8"), "no dtype 'float8'"),
    "another form": (("--to", "t.pdf"), "--to must name a .html or .json or .svg file in a folder that is there"),
    "no folder": (("--to", "no/t.svg"), "--to must name a .html or .json or .svg file in a folder that is there"),
    "a picture of no sweep": (("--to", "t.svg"), "add --sweep, or write .html"),
}


twin = Changed("sdpa", VECTORIZED, id)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_gets_one_line_and_status_2(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(benching, "report_on")  # nothing is judged before
    arguments, message = BAD_INPUT[what]
    done = CliRunner().invoke(app, ["bench", "sdpa", *arguments])
    assert done.exit_code == 2
    assert message in done.output
    assert len(done.output.splitlines()) == 1
