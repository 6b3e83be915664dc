"""`mha bench`: its tables, its files and its exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from mha.conformance import settings
from mha.conformance.benchmarks import compare, workloads
from mha.conformance.cli import bench
from mha.conformance.cli.app import app
from mha.conformance.cli.bench import BenchOptions
from mha.conformance.properties import registry
from mha.conformance.results import Report
from mha.implementations import Resolved, resolve
from support.reports_made import verdict
from support.timed import HEADS, SIZES, VECTORIZED, Changed


def judge_quickly(resolved: Resolved, *_: Any) -> Report:
    """Take the place of the judge: `loop` fails."""
    name = resolved.implementation.name
    verdicts = (verdict(name, "MSK-1", "fail" if name == "loop" else "pass"),)
    return Report(
        verdicts=verdicts, profile="quick", seed=0, versions={}, targets={name: resolved.target}
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for module in (bench, workloads):
        monkeypatch.setattr(module, "EVERY_SHAPE", {"encoder": SIZES, "prefill": HEADS})
    monkeypatch.setattr(bench, "DEFAULT_SHAPES", ("encoder",))
    monkeypatch.setattr(bench, "KERNEL_SHAPES", ("prefill",))
    monkeypatch.setattr(bench, "SWEEP", (8, 16))
    monkeypatch.setattr(bench, "judge_quickly", judge_quickly)
    monkeypatch.setattr(
        compare, "TOLERANCE", float("inf")
    )  # a busy machine times such small workloads badly
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


def test_verdicts_are_kept_until_a_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(settings, "properties", lambda: {"SHP-1": registry.properties()["SHP-1"]})
    source = Path("attention_to_bench.py")
    source.write_text("from mha.conformance.faults.base import correct as implementation\n")
    (resolved,) = resolve(f"{source}:implementation")
    quick = BenchOptions(targets=(resolved.target,)).settings()
    reports = [bench.judge_quickly(resolved, quick) for _ in range(2)]
    assert reports[0] == reports[1]
    source.write_text(source.read_text() + "# another version\n")
    bench.judge_quickly(resolved, quick)
    first, kept, again = capsys.readouterr().out.splitlines()
    assert first == again == "Judging Correct on cpu in float32 (profile quick, seed 0)"
    assert kept.startswith("Correct: judged before with these sources and versions (.mha/verdicts/")
    sys.modules.pop("attention_to_bench")


@pytest.mark.usefixtures("small")
def test_table_and_files_have_the_same_results() -> None:
    arguments = [
        "bench",
        "sdpa",
        "flex",
        "loop",
        "--rounds",
        "6",
        "--threads",
        "1",
        "--to",
        "t.json",
        "--to",
        "t.html",
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1, done.output
    reason = "it does not conform (MSK-1); see mha check loop --dtype float32 --device cpu"
    assert f"loop is not timed: {reason}" in done.output
    assert "encoder, inference, float32 on cpu, 1 thread\n" in done.output
    assert "flex                     not timed: it does not claim gradients" in done.output
    rows = json.loads(Path("t.json").read_text())
    assert [
        (row["implementation"], row["workload"]["training"], row["skip_reason"]) for row in rows
    ] == [
        ("sdpa", False, ""),
        ("flex", False, ""),
        ("flex", True, "it does not claim gradients"),
        ("sdpa", True, ""),
    ]
    assert f"{1e3 * median(rows[0]['seconds']):9.2f}    1.00     [1.00, 1.00]" in done.output
    page = Path("t.html").read_text()
    assert "2 of 3 implementations conform" in page
    assert f"<td>{1e3 * median(rows[0]['seconds']):.2f}</td><td>1.00</td>" in page
    assert "<figure>" not in page


@pytest.mark.usefixtures("small")
def test_claims_that_are_missing_are_not_an_error() -> None:
    done = CliRunner().invoke(app, ["bench", "flex", "--rounds", "6"])
    assert "not timed: it does not claim gradients" in done.output
    assert done.exit_code == 0, done.output


@pytest.mark.usefixtures("small")
def test_kernels_are_timed_as_they_are_unless_a_module_is_beside_them() -> None:
    done = CliRunner().invoke(app, ["bench", "sdpa", "flex", "--rounds", "6"])
    assert done.exit_code == 0, done.output
    assert "prefill, inference" in done.output
    assert "encoder" not in done.output
    done = CliRunner().invoke(app, ["bench", "minimal", "--shape", "prefill", "--rounds", "6"])
    assert "not timed: it is a module, and this is a workload of kernels" in done.output


@pytest.mark.usefixtures("small")
def test_sweep_is_drawn() -> None:
    arguments = [
        "bench",
        "sdpa",
        "minimal",
        "--sweep",
        "--rounds",
        "6",
        "--to",
        "s.svg",
        "--to",
        "s.html",
    ]
    swept = CliRunner().invoke(app, arguments)
    assert swept.exit_code == 0, swept.output
    assert Path("s.svg").read_text().strip() in Path("s.html").read_text()
    texts = {text.text for text in ElementTree.parse("s.svg").getroot().findall(".//{*}text")}
    assert {"sdpa", "minimal", "time in ms, against length", "8", "16", "100%"} <= texts


FILE_NAME = "--to takes a file name that ends in .html, .json or .svg, in an existing folder"
BAD_INPUT = {
    "an unknown shape": (("--shape", "decoder"), "unknown shape 'decoder'; did you mean encoder?"),
    "an unknown target": (("no_such",), "'no_such'"),
    "two implementations with one name": (
        (f"{__file__}:twin",),
        "two implementations are named 'sdpa'",
    ),
    "an unknown dtype": (("--dtype", "float8"), "unknown dtype 'float8'"),
    "an unknown format": (("--to", "t.pdf"), FILE_NAME),
    "a missing folder": (("--to", "no/t.svg"), FILE_NAME),
    "a picture without a sweep": (("--to", "t.svg"), "add --sweep, or write .html"),
}


twin = Changed("sdpa", VECTORIZED, id)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_gets_one_line_and_status_2(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(bench, "judge_quickly")  # so that judging anything raises
    arguments, message = BAD_INPUT[what]
    done = CliRunner().invoke(app, ["bench", "sdpa", *arguments])
    assert done.exit_code == 2
    assert message in done.output
    assert len(done.output.splitlines()) == 1
