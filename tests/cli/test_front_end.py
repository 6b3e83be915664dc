"""`pytest conformance` as a user runs it: what it selects, what it prints, and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from mha.conformance import Verdict, check, parametrize_with_clauses
from mha.conformance.cli.app import app
from mha.conformance.results import Report
from support.front_end import QUICK, run
from support.reports_made import without_volatile


def essence(verdict: Verdict) -> tuple[object, ...]:
    """Return the fields of a verdict that do not depend on how the implementation was named."""
    return (
        verdict.clause,
        verdict.dtype,
        verdict.status,
        verdict.examples,
        verdict.case,
        verdict.message,
        verdict.margin,
    )


def test_every_front_end_gives_the_same_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pytest.json"
    done = run("-k", "MSK-8 or SHP-1", "--mha-impl", "torch_mha", "--mha-report", str(file))
    assert done.returncode == 0, done.stdout
    monkeypatch.chdir(tmp_path)
    options = ["--clause", "msk-8,SHP-1", "--report", "mha.json"]
    assert CliRunner().invoke(app, ["check", "torch_mha", *options]).exit_code == 0
    reports = [
        check("torch_mha", clauses=["MSK-8", "SHP-1"]),
        Report.from_json(Path("mha.json").read_text()),
        Report.from_json(file.read_text()),
    ]
    called, command, plugin = (list(map(essence, report.verdicts)) for report in reports)
    assert called == command == plugin
    assert [verdict.status for verdict in reports[0].verdicts] == ["pass", "waived"] * 2
    assert {(report.profile, report.seed, report.conforms) for report in reports} == {
        ("default", 0, True)
    }


def test_clauses_are_parameters_of_a_test_in_the_order_of_the_contract(faulty: str) -> None:
    mark = parametrize_with_clauses(
        faulty, "quick", clauses=["MSK-8", "SHP-1"], dtypes=torch.float32
    )
    name, (shapes, empty_rows) = mark.args
    assert name == "check_clause"
    assert mark.kwargs["ids"] == ["FiniteFill-cpu-float32-SHP-1", "FiniteFill-cpu-float32-MSK-8"]
    shapes()
    with pytest.raises(
        pytest.fail.Exception, match=r"MSK-8 \(MUST\): Empty rows follow one declared policy"
    ):
        empty_rows()


NOT_JUDGED = {
    "several": ("all", {}, "'all' names [12][0-9] implementations; name one of them"),
    "an instance": (
        torch.nn.Linear(2, 2),
        {},
        "name the class Linear instead, because it is built in many sizes",
    ),
    "a number of clauses": ("loop", {"clauses": 8}, "expected a name, or several, but got 8"),
    "an unknown family": ("loop", {"clauses": "MASK"}, "unknown clause 'MASK'; did you mean MSK"),
}


@pytest.mark.parametrize("what", NOT_JUDGED)
def test_what_check_cannot_judge_is_named(what: str) -> None:
    implementation, options, message = NOT_JUDGED[what]
    with pytest.raises(ValueError, match=message):
        check(implementation, **options)


def test_keyword_selects_one_clause_and_the_header_names_what_is_judged() -> None:
    done = run("-k", "MSK-1", "--mha-impl", "loop", "sdpa", *QUICK, "-v")
    assert done.returncode == 0, done.stdout
    ids = {line.split("::")[1].split()[0] for line in done.stdout.splitlines() if "::" in line}
    assert ids == {"contract[loop-cpu-float32-MSK-1]", "contract[sdpa-cpu-float32-MSK-1]"}
    for line in (
        "judging: loop, sdpa",
        "on: cpu in float32; profile quick, seed 0",
        "with: mha-conformance",
        "estimate: about 5 s on one core",
    ):
        assert line in done.stdout
    assert "loop: CONFORMS: 1 answer right" in done.stdout


FAULTY = """\
from mha.conformance.faults import registry

implementation = registry.implementations["FiniteFill"]
"""


@pytest.fixture
def faulty(tmp_path: Path) -> str:
    """Return the target of an implementation that fails MSK-8."""
    path = tmp_path / "my_attention.py"
    path.write_text(FAULTY)
    return f"{path}:implementation"


@pytest.mark.slow
def test_failure_is_described_once_and_the_verdict_is_last_in_ci(
    faulty: str, tmp_path: Path
) -> None:
    step = {"CI": "true", "GITHUB_STEP_SUMMARY": str(tmp_path / "step.md")}
    done = run("-k", "MSK-8", "--mha-impl", faulty, *QUICK, "-n", "1", env=os.environ | step)
    assert done.returncode == 1
    assert done.stdout.count("To reproduce it without the judge") == 1
    assert (
        "cpu-float32-MSK-8] - a query without an allowed key attends to all keys equally"
        in done.stdout
    )
    last = " ".join(line.strip() for line in done.stdout.splitlines()[-3:-1])
    assert last.startswith(
        "FiniteFill: DOES NOT CONFORM: 1 of 1 answers is wrong (MSK-8): a query without an"
        " allowed key"
    )
    assert (tmp_path / "step.md").read_text().count(
        "## Multi-head attention conformance report"
    ) == 1
    assert "case       Case(mask='empty_rows')" in done.stdout
    assert "FiniteFill: DOES NOT CONFORM: 1 of 1 answers is wrong" in done.stdout
    assert "Traceback" not in done.stdout


def test_script_of_a_failure_runs_alone_and_fails(faulty: str, tmp_path: Path) -> None:
    done = run("-k", "MSK-8", "--mha-impl", faulty, *QUICK)
    indented = done.stdout.split("run it:\n\n")[1].split("=====")[0]
    script = tmp_path / "script.py"
    script.write_text("\n".join(line.removeprefix("    ") for line in indented.splitlines()))
    imported = "from mha.conformance.faults.mask_edges import faulty_FiniteFill as"
    assert "mha.conformance" not in script.read_text().replace(imported, "")
    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert alone.returncode == 1
    assert "AssertionError" in alone.stderr
    (tmp_path / "my_attention.py").write_text(
        "from mha.conformance.faults.base import correct as implementation\n"
    )
    script.write_text(script.read_text().replace(imported, "from my_attention import"))
    corrected = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert corrected.returncode == 0, corrected.stderr


A_CLASS = "mha.spec:Config"
BAD_INPUT = {
    "an unknown implementation": (
        ("--mha-impl", "nonsense"),
        "no implementation is registered as 'nonsense'",
    ),
    "not an implementation": (("--mha-impl", A_CLASS), "is a class"),
    "a missing file": (("--mha-impl", "nowhere.py:thing"), "there is no file 'nowhere.py'"),
    "an empty name": (("--mha-impl", ""), "--mha-impl is empty"),
    "an unknown profile": (
        ("--mha-profile", "slow"),
        "unknown profile 'slow'; known: quick, default, thorough",
    ),
    "an unknown dtype": (("--mha-dtype", "float8"), "unknown dtype 'float8'"),
    "an unknown device": (
        ("--mha-device", "tpu"),
        "unknown device 'tpu'; did you mean cpu? Known: cpu, cuda",
    ),
    "a seed that is not a number": (("--mha-seed", "three"), "--mha-seed must be a whole number"),
    "a report in an unknown format": (
        ("--mha-report", "report.doc"),
        "--mha-report takes a file name that ends in .html, .json or .md",
    ),
    "a report in a missing folder": (
        ("--mha-report", "no/such/report.json"),
        "there is no folder 'no/such'",
    ),
    "a missing waiver file": (
        ("--mha-waivers", "nowhere.toml"),
        "the waiver file 'nowhere.toml' cannot be read",
    ),
}


if not torch.cuda.is_available():
    BAD_INPUT["a missing device"] = (("--mha-device", "cuda"), "torch finds no CUDA device here")


@pytest.mark.mostly_slow(4)
@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_gets_one_line_and_status_2(what: str) -> None:
    arguments, message = BAD_INPUT[what]
    done = run(*arguments)
    output = done.stdout + done.stderr
    assert (done.returncode, len(output.strip().splitlines())) == (2, 1), output
    assert message in output


def test_unrelated_run_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "import sys\n\ndef test_other(): assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_other.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert "judging" not in done.stdout


@pytest.mark.slow
def test_run_in_which_nothing_is_judged_has_status_2() -> None:
    done = run("-k", "SHP-2", "--mha-impl", "sdpa", *QUICK, "-n", "1")
    assert done.returncode == 2
    assert "sdpa: NOTHING WAS JUDGED" in done.stdout
    last = done.stdout.splitlines()[-2]
    assert last.startswith("mha: exit status 2: nothing was judged: needs the claim "), done.stdout


# It lacks a layer for other numbers of heads than that of the first look.
BROKEN = """\
import torch
from mha.implementations import from_module
from mha.implementations.minimal import MinimalAttention
from mha.spec import Claims

class Broken(MinimalAttention):
    def __init__(self, d_model, n_heads):
        super().__init__(d_model, n_heads)
        if n_heads != 2:
            del self.q

names = {"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "o"}
claims = Claims(returns_weights=False)
implementation = from_module(Broken, name="broken", parameters=names, claims=claims)
"""


def test_last_lines_say_why_the_judge_failed(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    done = run("-k", "SHP-1", "--mha-impl", f"{tmp_path}/broken.py:implementation", *QUICK)
    assert done.returncode == 2, done.stdout
    last = done.stdout.splitlines()[-2]
    reason = "the judge or an adapter failed (harness error) on SHP-1 of broken: "
    assert last.startswith(f"mha: exit status 2: {reason}"), done.stdout
    assert "the module has no 'q'" in last


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("workers", ["0", "1"])
def test_properties_of_a_verdict_are_single_in_junit_xml(
    faulty: str, workers: str, tmp_path: Path
) -> None:
    file = tmp_path / "junit.xml"
    options = ("--mha-impl", faulty, *QUICK, "-n", workers, "--junitxml", str(file))
    assert run("-k", "MSK-8 or SHP-1 or GQA-1", *options).returncode == 1
    found = {}
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        own = {each.attrib["name"]: each.attrib["value"] for each in case.iter("property")}
        found[own["mha.clause"]] = own
    failed = found["MSK-8"]
    assert {
        name: failed[f"mha.{name}"]
        for name in ("implementation", "level", "dtype", "device", "status")
    } == {
        "implementation": "FiniteFill",
        "level": "MUST",
        "dtype": "float32",
        "device": "cpu",
        "status": "fail",
    }
    assert (failed["mha.case"], failed["mha.required"]) == ("Case(mask='empty_rows')", "true")
    assert failed["mha.diagnosis"].startswith(
        "a query without an allowed key attends to all keys equally"
    )
    assert (found["SHP-1"]["mha.status"], found["GQA-1"]["mha.status"]) == ("pass", "not_claimed")
    assert "mha.case" not in found["SHP-1"]
    assert all("{" not in value for own in found.values() for value in own.values())


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_report_in_the_order_of_the_contract(
    tmp_path: Path,
) -> None:
    texts, summaries = [], []
    for workers in ("0", "2"):
        file = tmp_path / f"{workers}.json"
        arguments = ("-k", "SHP-1 or MSK-1 or CFG-2", "-n", workers, "--mha-impl", "sdpa", "loop")
        done = run(*arguments, *QUICK, "--mha-report", str(file))
        assert done.returncode == 0, done.stdout
        texts.append(without_volatile(file.read_text()))
        summaries.append(done.stdout.split("judging: sdpa, loop")[-1].split("=====")[0])
    assert texts[0] == texts[1]
    assert summaries[0] == summaries[1]
    assert "loop: CONFORMS" in summaries[0]
    report = texts[0]
    assert report["conforms"]
    assert not report["incomplete"]
    assert [verdict["implementation"] for verdict in report["verdicts"]] == ["sdpa"] * 3 + [
        "loop"
    ] * 3
    assert [verdict["clause"] for verdict in report["verdicts"]] == ["CFG-2", "SHP-1", "MSK-1"] * 2


def test_run_that_stops_at_the_first_failure_is_incomplete(faulty: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = run(
        "-x", "-k", "MSK-8 or MSK-9", "--mha-impl", faulty, "--mha-report", str(file), *QUICK
    )
    assert done.returncode == 1
    assert (
        "FiniteFill: INCOMPLETE, so far: DOES NOT CONFORM: 1 of 1 answers is wrong" in done.stdout
    )
    assert json.loads(file.read_text())["incomplete"]


def test_report_that_cannot_be_written_leaves_the_verdicts_on_screen(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.symlink_to("/dev/full")
    done = run("-k", "SHP-1", "--mha-impl", "loop", "--mha-report", str(file), *QUICK)
    assert done.returncode == 2
    assert "loop: CONFORMS: 1 answer right" in done.stdout
    last = f"mha: exit status 2: the report cannot be written to '{file}': No space left on device"
    assert done.stdout.splitlines()[-2].startswith(last)
    assert "Traceback" not in done.stdout + done.stderr
