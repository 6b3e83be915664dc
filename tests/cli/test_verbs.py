"""`mha report`, `mha replay` and `mha waive`: what they do with the last run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mha.conformance import Verdict
from mha.conformance.engine.workers import Workers
from mha.conformance.reports.files import LAST
from mha.conformance.results import Report
from support.command import CORRECT, run
from support.reports_made import report, two_implementations, verdict

FAULTY = "mha.conformance.faults.mask_edges:faulty_FiniteFill"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run each test in a folder of its own, where the last run is kept."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def judge(*options: str) -> tuple[int, str]:
    """Judge an implementation that fails MSK-8 only."""
    return run(
        "check", FAULTY, "--clause", "MSK-8", "--clause", "SHP-1", "--dtype", "float32", *options
    )


def test_last_run_is_kept_reported_and_replayed() -> None:
    assert judge()[0] == 1
    kept = Report.from_json(LAST.read_text())
    assert kept.targets == {"FiniteFill": FAULTY}
    assert [verdict.status for verdict in kept.verdicts] == ["pass", "fail"]
    assert Path(".mha/.gitignore").read_text() == "*\n"
    status, output = run("report")
    assert status == 1
    assert "FiniteFill     1/2   ✓  ✗1" in output
    assert (
        "\nFiniteFill: DOES NOT CONFORM: 1 of 2 answers is wrong (MSK-8): a query without" in output
    )
    status, output = run("replay")
    assert status == 1
    assert output.startswith(
        "FAILS        MSK-8   FiniteFill, float32 on cpu: output_2[0, 0, 0] is -0.0799, but should"
    )
    status, output = run("replay", "--impl", CORRECT)
    assert (status, output) == (
        0,
        "FIXED        MSK-8   FiniteFill, float32 on cpu: Case(mask='empty_rows')\n",
    )


def test_narrower_run_updates_the_last_one_and_another_one_replaces_it() -> None:
    mine, options = Path("mine.py"), ("--dtype", "float32", "--profile", "quick")
    mine.write_text(
        "from mha.conformance.faults.mask_edges import faulty_FiniteFill as implementation\n"
    )
    assert run("check", "it=mine.py:implementation", "--clause", "MSK-8,SHP-1", *options)[0] == 1
    assert run("show", "msk-8")[1].count("To reproduce it without the judge") == 1
    mine.write_text(f"from {CORRECT.replace(':', ' import ')} as implementation\n")
    assert (
        run("check", "it=mine.py:implementation", "--clause", "MSK-8", "--profile", "quick")[0] == 0
    )
    last = Report.from_json(LAST.read_text())
    assert [(v.clause, v.dtype, v.status) for v in last.verdicts] == [
        ("SHP-1", "float32", "pass"),
        ("MSK-8", "float32", "pass"),
    ]
    assert last.since
    assert (
        f"Some verdicts are of {last.since}, others of runs up to {last.started}"
        in run("report")[1]
    )
    assert run("show", "MSK-8", "SHP")[1].startswith("pass            SHP-1   float32: ")
    assert (
        run("check", "it=mine.py:implementation", "--clause", "SHP-1", *options, "--seed", "1")[0]
        == 0
    )
    assert [verdict.clause for verdict in Report.from_json(LAST.read_text()).verdicts] == ["SHP-1"]
    (kept,) = Path(".mha/history").iterdir()
    assert Report.from_json(kept.read_text()) == last
    status, output = run("show", "MSK-8")
    assert (status, output) == (
        2,
        "mha: MSK-8 was not judged in the run of '.mha/last.json'; see mha report\n",
    )


def test_target_may_give_a_name() -> None:
    status, output = run(
        "check", f"before={FAULTY}", f"after={CORRECT}", "--clause", "MSK-8", "--dtype", "float32"
    )
    assert status == 1
    assert "before: DOES NOT CONFORM" in output
    assert "after: CONFORMS" in output
    assert (
        "from mha.conformance.faults.mask_edges import faulty_FiniteFill as implementation"
        in output
    )
    assert Report.from_json(LAST.read_text()).targets == {
        "before": f"before={FAULTY}",
        "after": f"after={CORRECT}",
    }
    status, output = run("replay")
    assert (status, "MSK-8   before, float32 on cpu" in output) == (1, True)


def test_single_case_is_replayed() -> None:
    case = "Case(mask='empty_rows', L=2)"
    status, output = run("replay", case, "--clause", "msk-8", "--impl", FAULTY)
    assert status == 1
    assert output.startswith("FAILS        MSK-8   FiniteFill: output_2[0, 0, 0] is ")
    fixed = run("replay", case, "--clause", "MSK-8", "--impl", CORRECT)
    assert fixed == (0, f"FIXED        MSK-8   Correct: {case}\n")
    status, output = run("replay", "Case()", "--clause", "MSK-9", "--impl", CORRECT)
    assert status == 2
    assert output.startswith("INAPPLICABLE MSK-9   Correct: ")


def test_replay_of_an_unclaimed_clause_is_inapplicable() -> None:
    Path("mine.py").write_text(
        "from dataclasses import replace\nfrom mha.spec import Claims\n"
        "from mha.conformance.faults.base import correct\n"
        "implementation = replace(correct, claims=Claims(masks=()))\n"
    )
    status, output = run(
        "replay",
        "Case(mask='padding', S=3)",
        "--clause",
        "MSK-4",
        "--impl",
        "mine.py:implementation",
    )
    assert status == 2
    assert output == "INAPPLICABLE MSK-4   Correct: needs the claim masks\n"


def test_waiver_is_written_for_a_failure_and_applies() -> None:
    judge()
    arguments = (
        "--reason",
        'rows are "never" empty',
        "--url",
        "https://example.org/1",
        "--expires",
        "2999-12-31",
    )
    status, output = run("waive", "msk-8", *arguments)
    assert status == 0
    written = (
        '[[waiver]]\nimplementation = "FiniteFill"\nclause = "MSK-8"\nreason = "rows are'
        ' \\"never\\" empty"\nurl = "https://example.org/1"\nexpires = 2999-12-31\n'
    )
    assert output == f"added to mha_waivers.toml:\n\n{written}\n"
    assert Path("mha_waivers.toml").read_text() == written
    status, output = judge("--waivers", "mha_waivers.toml")
    assert status == 0
    assert "FiniteFill: CONFORMS, with waivers: " in output
    Path("mha_waivers.toml").write_text("# ours")
    assert run("waive", "MSK-8", *arguments) == (
        2,
        "mha: nothing to waive: MSK-8 does not fail in '.mha/last.json'\n",
    )


def test_waiver_is_limited_to_the_dtypes_that_fail() -> None:
    made = report(
        verdict("x", "MSK-8", "fail"),
        verdict("x", "MSK-8", dtype="float64"),
        verdict("y", "MSK-8", "fail"),
    )
    Path("run.json").write_text(made.to_json())
    options = ("waive", "MSK-8", "--reason", "known", "--run", "run.json", "--where", "L < 9")
    assert run(*options) == (2, "mha: x, y fail MSK-8; name one of them with --impl\n")
    assert run(*options, "--impl", "x")[0] == 0
    assert run(*options, "--impl", "y")[0] == 0
    text = Path("mha_waivers.toml").read_text()
    assert text.count("[[waiver]]") == 2
    assert text.count('dtype = ["float32"]\ndevice = ["cpu"]\nwhere = "L < 9"') == 1
    status, output = run(*options, "--impl", "x")
    assert (status, output) == (
        2,
        "mha: mha_waivers.toml already has a waiver of MSK-8 for x; edit that one\n",
    )


def test_waiver_is_added_below_what_the_file_holds() -> None:
    judge()
    Path("mha_waivers.toml").write_text("# ours")
    assert run("waive", "MSK-8", "--reason", "x")[0] == 0
    assert Path("mha_waivers.toml").read_text().startswith("# ours\n\n[[waiver]]\n")
    assert judge("--waivers", "mha_waivers.toml")[0] == 0


@pytest.mark.parametrize("existing", ["file", "folder"])
def test_report_is_written_where_the_last_run_cannot_be_kept(
    existing: str, empty_folder: Path
) -> None:
    if existing == "file":
        (empty_folder / ".mha").write_text("")
    else:
        (empty_folder / ".mha" / "last.json").mkdir(parents=True)
    assert judge("--report", "run.json")[0] == 1
    assert Report.from_json(Path("run.json").read_text()).verdicts


def test_output_in_ascii_has_plain_signs(empty_folder: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    arguments = [
        "check",
        FAULTY,
        CORRECT,
        "--clause",
        "MSK-8",
        "--dtype",
        "float32",
        "--report",
        "run.json",
    ]
    command = [sys.executable, "-m", "mha.conformance", *arguments]
    done = subprocess.run(
        command, cwd=empty_folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stderr
    assert "FiniteFill     0/1  x1" in done.stdout
    assert len(Report.from_json((empty_folder / "run.json").read_text()).verdicts) == 2


SWALLOWS = """\
import contextlib, os, signal, time
from mha.conformance import check
from mha.conformance.faults import registry

# A process in the background ignores it by default.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Swallows(registry.Correct):
    def merge(self, x):
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        return super().merge(x)

check(registry.implementation_of(Swallows), "quick", clauses=["SHP-1"], dtypes=["float32"])
"""


@pytest.mark.slow
def test_interrupt_that_the_implementation_swallows_ends_the_run() -> None:
    # In a process of its own: the workers of pytest-xdist do not react to interrupts.
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWS], capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


# The handler runs in the callback of a garbage collection, as it does if the signal arrives during
# one.
INTERRUPTED_IN_A_COLLECTION = """
import gc, signal, sys
from mha.conformance.cli import app, check

def advance(*arguments):
    if not done:
        done.append(gc.callbacks.append(lambda phase, info: signal.raise_signal(signal.SIGINT)))
        gc.collect()
        gc.callbacks.pop()

done = []
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may ignore it
check.advance = advance
sys.argv = ["mha", "check", "loop", "--clause", "SHP-1,SHP-4"]
sys.argv += ["--dtype", "float32", "--profile", "quick"]
app.app()
"""


@pytest.mark.slow
def test_interrupt_during_a_garbage_collection_ends_the_run() -> None:
    command = [sys.executable, "-c", INTERRUPTED_IN_A_COLLECTION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "SHP-1" in done.stdout
    assert "SHP-4" not in done.stdout
    assert "INCOMPLETE: the run was stopped." in done.stdout
    assert done.returncode == 2


def test_report_is_rendered_merged_and_compared() -> None:
    whole = two_implementations()
    for name, part in (("one", whole.verdicts[:5]), ("other", whole.verdicts[5:])):
        Path(f"{name}.json").write_text(report(*part).to_json())
    status, output = run(
        "report",
        "one.json",
        "other.json",
        "--merge",
        "--to",
        "all.json",
        "--to",
        "all.html",
        "--to",
        "all.md",
    )
    assert (status, output) == (0, "wrote all.json\nwrote all.html\nwrote all.md\n")
    assert Report.from_json(Path("all.json").read_text()).verdicts == whole.verdicts
    assert Path("all.html").read_text().startswith("<!doctype html>")
    status, output = run("report", "one.json", "all.json")
    assert status == 0
    assert output.splitlines()[-1] == "unchanged: 5 of 10 verdicts"
    status, output = run("report", "other.json", "one.json")
    assert status == 1
    assert "new failures: 1" in output
    status, output = run("report", "other.json", "one.json", "--to", "diff.md", "--to", "diff.json")
    assert (status, output.splitlines()[-2:]) == (1, ["wrote diff.md", "wrote diff.json"])
    assert "### New failures: 1\n" in Path("diff.md").read_text()
    assert json.loads(Path("diff.json").read_text())["exit_status"] == 1
    status, output = run("report", "--schema")
    assert json.loads(output) == Report.schema()


def test_interrupted_check_keeps_its_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> Iterator[Verdict]:
        yield verdict("FiniteFill", "SHP-1")
        raise KeyboardInterrupt

    monkeypatch.setattr(Workers, "judge_all", interrupted)
    status, output = judge("--report", "run.md")
    assert status == 2
    assert "\n\nINCOMPLETE: " in output
    assert Report.from_json(LAST.read_text()).incomplete
    assert "INCOMPLETE: " in Path("run.md").read_text()
