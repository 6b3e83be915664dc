"""`mha report`, `mha replay` and `mha waive`: what they do with the last run, and with what they cannot use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from reports_made import report, two_implementations, verdict
from typer.testing import CliRunner

from mha.conformance.cli.app import app
from mha.conformance.reports.files import LAST
from mha.conformance.results import Report

FAULTY = "mha.conformance.faults.mask_edges:faulty_FiniteFill"
RIGHT = "mha.conformance.faults.base:correct"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    """Run `mha`; return its status, and all that it says."""
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def judge(*more: str) -> tuple[int, str]:
    """Judge a class that fails MSK-8 alone."""
    return run("check", FAULTY, "--clause", "MSK-8", "--clause", "SHP-1", "--dtype", "float32", *more)


def test_last_run_is_kept_reported_and_replayed() -> None:
    assert judge()[0] == 1
    kept = Report.from_json(LAST.read_text())
    assert kept.targets == {"FiniteFill": FAULTY}
    assert [v.status for v in kept.verdicts] == ["pass", "fail"]
    assert Path(".mha/.gitignore").read_text() == "*\n"
    status, told = run("report")
    assert status == 1
    assert "FiniteFill   ✓  ✗1" in told
    assert "meets 1 of the 2 clauses that it claims" in told
    status, told = run("replay")
    assert status == 1
    assert told.startswith("FAILS   MSK-8   FiniteFill, float32 on cpu: output_2[0, 0, 0] is -0.0798787773, but")
    status, told = run("replay", "--impl", RIGHT)
    assert (status, told) == (0, "FIXED   MSK-8   FiniteFill, float32 on cpu: Case(mask='empty_rows')\n")


def test_case_alone_is_replayed() -> None:
    case = "Case(mask='empty_rows', L=2)"
    status, told = run("replay", case, "--clause", "msk-8", "--impl", FAULTY)
    assert status == 1
    assert told.startswith("FAILS   MSK-8   FiniteFill: output_2[0, 0, 0] is ")
    assert run("replay", case, "--clause", "MSK-8", "--impl", RIGHT) == (0, f"FIXED   MSK-8   Correct: {case}\n")
    status, told = run("replay", "Case()", "--clause", "MSK-9", "--impl", RIGHT)
    assert status == 2
    assert told.startswith("SILENT  MSK-9   Correct: ")


def test_waiver_is_written_from_a_failure_and_heeded() -> None:
    judge()
    arguments = ("--reason", 'rows are "never" empty', "--url", "https://example.org/1", "--expires", "2999-12-31")
    status, told = run("waive", "msk-8", *arguments)
    assert status == 0
    written = (
        '[[waiver]]\nimplementation = "FiniteFill"\nclause = "MSK-8"\nreason = "rows are \\"never\\" empty"\n'
        'url = "https://example.org/1"\nexpires = 2999-12-31\n'
    )
    assert told == f"added to waivers.toml:\n\n{written}\n"
    assert Path("waivers.toml").read_text() == written
    status, told = judge("--waivers", "waivers.toml")
    assert status == 0
    assert "FiniteFill: conforms but for what is waived (1 pass, 1 waived;" in told
    Path("waivers.toml").write_text("# ours")
    assert run("waive", "MSK-8", *arguments) == (2, "mha: nothing to waive: MSK-8 does not fail in '.mha/last.json'\n")


def test_waiver_is_of_the_dtypes_that_fail() -> None:
    made = report(verdict("x", "MSK-8", "fail"), verdict("x", "MSK-8", dtype="float64"), verdict("y", "MSK-8", "fail"))
    Path("run.json").write_text(made.to_json())
    options = ("waive", "MSK-8", "--reason", "known", "--run", "run.json", "--where", "L < 9")
    assert run(*options) == (2, "mha: x, y fail MSK-8: name one of them with --impl\n")
    assert run(*options, "--impl", "x")[0] == 0
    assert run(*options, "--impl", "y")[0] == 0
    text = Path("waivers.toml").read_text()
    assert text.count("[[waiver]]") == 2
    assert text.count('dtype = ["float32"]\ndevice = ["cpu"]\nwhere = "L < 9"') == 1
    status, told = run(*options, "--impl", "x")
    assert (status, told) == (2, "mha: waivers.toml has a waiver of MSK-8 for x already; change that one\n")


def test_waiver_goes_below_what_is_there() -> None:
    judge()
    Path("waivers.toml").write_text("# ours")
    assert run("waive", "MSK-8", "--reason", "x")[0] == 0
    assert Path("waivers.toml").read_text().startswith("# ours\n\n[[waiver]]\n")
    assert judge("--waivers", "waivers.toml")[0] == 0


def test_what_is_not_claimed_is_not_replayed_as_a_failure() -> None:
    Path("mine.py").write_text(
        "from dataclasses import replace\nfrom mha.spec import Claims\n"
        "from mha.conformance.faults.base import correct\n"
        "implementation = replace(correct, claims=Claims(masks=()))\n"
    )
    status, told = run("replay", "Case(mask='padding', S=3)", "--clause", "MSK-1", "--impl", "mine.py:implementation")
    assert status == 2
    assert told == "SILENT  MSK-1   Correct: needs the claim masks\n"


@pytest.mark.parametrize("there", ["file", "folder"])
def test_report_is_written_where_the_last_run_cannot_be_kept(there: str, here: Path) -> None:
    if there == "file":
        (here / ".mha").write_text("")
    else:
        (here / ".mha" / "last.json").mkdir(parents=True)
    assert judge("--report", "run.json")[0] == 1
    assert Report.from_json(Path("run.json").read_text()).verdicts


def test_output_that_cannot_show_signs_loses_nothing(here: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    arguments = ["check", FAULTY, RIGHT, "--clause", "MSK-8", "--dtype", "float32", "--report", "run.json"]
    command = [sys.executable, "-c", "from mha.conformance.cli.app import main; main()", *arguments]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "FiniteFill  x1" in done.stdout
    assert len(Report.from_json((here / "run.json").read_text()).verdicts) == 2


SWALLOWS = """\
import contextlib, os, signal, time
from mha.conformance import check
from mha.conformance.faults import registry

signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background ignores it

class Swallows(registry.Correct):
    def merge(self, x):
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        return super().merge(x)

check(registry.implementation_of(Swallows), "quick", clauses=["SHP-1"], dtypes=["float32"])
"""


def test_interrupt_that_something_swallows_ends_the_run() -> None:
    # In a process of its own: the workers of pytest-xdist do not heed interrupts.
    done = subprocess.run([sys.executable, "-c", SWALLOWS], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


def test_report_is_rendered_merged_and_compared() -> None:
    whole = two_implementations()
    for name, part in (("one", whole.verdicts[:5]), ("other", whole.verdicts[5:])):
        Path(f"{name}.json").write_text(report(*part).to_json())
    status, told = run(
        "report", "one.json", "other.json", "--merge", "--to", "all.json", "--to", "all.html", "--to", "all.md"
    )
    assert (status, told) == (0, "wrote all.json\nwrote all.html\nwrote all.md\n")
    assert Report.from_json(Path("all.json").read_text()).verdicts == whole.verdicts
    assert Path("all.html").read_text().startswith("<!doctype html>")
    status, told = run("report", "one.json", "all.json")
    assert status == 0
    assert told.endswith("10 verdicts, 5 as before\n")
    status, told = run("report", "other.json", "one.json")
    assert status == 1
    assert "new failures: 1" in told
    status, told = run("report", "--schema")
    assert json.loads(told) == Report.schema()


def test_interrupted_check_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from mha.conformance import checking

    def stopped(*arguments: object, **options: object) -> object:
        yield verdict("FiniteFill", "SHP-1")
        raise KeyboardInterrupt

    monkeypatch.setattr(checking, "judged", stopped)
    status, told = judge("--report", "run.md")
    assert status == 2
    assert "INCOMPLETE: the run was stopped." in told
    assert Report.from_json(LAST.read_text()).incomplete
    assert "INCOMPLETE: the run was stopped." in Path("run.md").read_text()


@pytest.mark.parametrize("verb", ["", "spec", "check", "report", "replay", "waive", "list", "init", "bench", "faults"])
def test_help_fits_a_screen_and_has_an_example(verb: str) -> None:
    status, told = run(*filter(None, [verb]), "--help")
    assert status == 0
    assert len(told.splitlines()) <= 40
    assert "Example: mha " in " ".join(told.split())
