"""Implementations that work against the suite get their own verdict, and no other is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mha.conformance import check
from mha.conformance.faults import hostile, hostile_changes, hostile_exceptions, hostile_results
from mha.implementations import resolve
from mha.implementations.discovery import originals
from support.forks import run_module
from support.front_end import HERE, QUICK, run

HOSTILE = "mha.conformance.faults.hostile"
MESSAGES = {
    # Ctrl-C comes with a signal; without one, the exception is that of the call.
    "interrupts": ("SHP-1", "the call raised KeyboardInterrupt"),
    "exits": ("SHP-1", "the call raised SystemExit"),
    "closes": ("SHP-1", "the call raised GeneratorExit"),
    "gives_nothing": ("SHP-1", "but should return Output(output, weights)"),
    "gives_elsewhere": ("SHP-1", "output_2.device is meta, but should be cpu"),
    "gives_lazy": ("SHP-1", "output_2 is of type Lazy, but should be a tensor"),
    "writes_later": ("NUM-1", "but should be"),
    "replaces_comparisons": (
        "STA-5",
        "the call replaced torch.Tensor.all, torch.allclose, torch.equal, for everybody",
    ),
    "replaces_softmax": (
        "STA-5",
        "the call replaced torch.Tensor.softmax, torch.softmax, for everybody",
    ),
    "seeks_the_oracle": ("NUM-1", "but should be"),
}


# What is wrong by 1000 and hides it: the clause that shows it, and its message.
RESULTS = {
    "answers_for_another": ("NUM-1", "is 1e+03, but should be"),
    "reports_for_another": ("INC-1", "is 1e+03, but should be"),
    "turns_the_inputs": ("NUM-1", "but should be"),
    "turns_the_class": ("NUM-1", "but should be"),
    "repairs_earlier_results": ("STA-3", "but should be"),
    "asks_the_judge": ("NUM-1", "but should be"),
    "asks_from_a_thread": ("NUM-1", "but should be"),
    "asks_the_session": ("NUM-1", "but should be"),
    "leaves_a_mode": ("STA-5", "the call left the mode _Equal entered, for everybody"),
    "leaves_a_mode_of_dispatch": (
        "STA-5",
        "the call left the mode _EqualBelow entered, for everybody",
    ),
    "leaves_a_device": ("STA-5", "the call changed the default device, for everybody"),
}


@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize("name", RESULTS)
def test_wrong_result_that_hides_itself_fails(name: str) -> None:
    clause, message = RESULTS[name]
    (verdict,) = check(
        getattr(hostile_results, name), "quick", clauses=[clause], dtypes=["float32"]
    ).verdicts
    assert (verdict.status, message in verdict.message) == ("fail", True), verdict.message
    assert torch.ones(()).device.type == "cpu"


@pytest.mark.usefixtures("undiagnosed")
def test_gradients_of_weights_that_hide_themselves_fail() -> None:
    (verdict,) = check(
        hostile_results.reports_for_another, "quick", clauses=["GRD-1"], dtypes=["float32"]
    ).verdicts
    assert (verdict.status, "but should be" in verdict.message) == ("fail", True), verdict.message


@pytest.mark.mostly_slow(4)
@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize("name", hostile_exceptions.RAISING)
def test_exception_that_would_steer_the_judge_is_that_of_the_call(name: str) -> None:
    """It discards no case, skips no test and ends no run; as a refusal, any will do."""
    implementation = hostile_exceptions.RAISING[name]
    verdicts = check(
        implementation, "quick", clauses=["SHP-1", "NUM-1", "SHP-6"], dtypes=["float32"]
    ).verdicts
    assert [verdict.status for verdict in verdicts] == ["fail", "pass", "blocked"]
    assert verdicts[0].message.startswith("the call raised ")


@pytest.mark.usefixtures("undiagnosed")
def test_case_is_not_discarded_where_an_attribute_is_looked_at() -> None:
    implementation = hostile_exceptions.discards_when_looked_at
    verdicts = check(
        implementation, "quick", clauses=["SHP-1", "NUM-1"], dtypes=["float32"]
    ).verdicts
    assert [verdict.status for verdict in verdicts] == ["fail", "blocked"]
    assert verdicts[0].message.startswith("the call raised Discard: nothing is wrong")


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("name", ["fails_as_expected", "skips", "ends_the_run", "fails_in_pytest"])
def test_exceptions_of_pytest_steer_no_run(name: str) -> None:
    done = run(
        "-k", "SHP-1", "-n", "0", "--mha-impl", f"{HOSTILE}_exceptions:{name}", "loop", *QUICK
    )
    assert done.returncode == 1, done.stdout
    assert f"{name}: DOES NOT CONFORM: 1 of 1 answers is wrong" in done.stdout
    assert "loop: CONFORMS: 1 answer right" in done.stdout


@pytest.mark.mostly_slow(3)
@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize("name", hostile_changes.CHANGING)
def test_call_that_changes_the_judge_fails_and_is_undone(name: str) -> None:
    implementation, said = hostile_changes.CHANGING[name]
    before = originals.changes()
    report = check(implementation, "quick", clauses=["SHP-1", "STA-5"], dtypes=["float32"])
    verdict = report.verdicts[-1]
    assert (verdict.clause, verdict.status) == ("STA-5", "fail")
    assert f"the call {said}" in verdict.message
    assert originals.new_changes(before) == {}
    loop = resolve("loop")[0].implementation
    assert check(loop, "quick", clauses=["SHP-1", "STA-5"], dtypes=["float32"]).conforms


OWN_IMPORTS = {
    "a function": (
        "import mha.conformance.harness.assertions as judge\njudge.expect_close = print",
        "assertions.expect",
    ),
    "a property": (
        "import mha.conformance.results as judge\njudge.Verdict.conforms = True",
        "results.Verdict.conforms",
    ),
    "a module": (
        "import sys\nsys.modules['mha.conformance.harness.assertions'] = sys",
        "sys.modules['mha.conformance",
    ),
}


@pytest.mark.parametrize("what", OWN_IMPORTS)
def test_import_that_replaces_a_part_of_the_judge_is_refused(tmp_path: Path, what: str) -> None:
    code, name = OWN_IMPORTS[what]
    (tmp_path / "own.py").write_text(f"from {HOSTILE} import gives_nothing\n{code}\n")
    done = run_module(
        "mha.conformance.cli", "check", "own.py:gives_nothing", "--profile", "quick", cwd=tmp_path
    )
    assert done.returncode == 2, done
    assert "it replaces mha.conformance" in done.stderr or "it replaces sys.modules" in done.stderr
    assert name in done.stderr


def test_import_may_replace_what_is_not_the_judges(tmp_path: Path) -> None:
    """As scripts do that silence warnings, or print in colour; the judge runs without."""
    code = (
        "import builtins, os, sys, warnings\nwarnings.warn = builtins.print = lambda *_, **__:"
        " None\n"
    )
    code += "sys.path.append('.')\nos.environ['A'] = 'b'\nimport torch\n"
    (tmp_path / "own.py").write_text(f"{code}from mha.implementations.loop import implementation\n")
    command = [
        "check",
        "own.py:implementation",
        "--clause",
        "SHP-1",
        "--clause",
        "STA-5",
        "--profile",
        "quick",
    ]
    done = run_module("mha.conformance.cli", *command, cwd=tmp_path)
    assert done.returncode == 0, done


@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize("name", MESSAGES)
def test_hostile_implementation_fails_with_its_own_message(name: str) -> None:
    clause, message = MESSAGES[name]
    (verdict,) = check(
        getattr(hostile, name), "quick", clauses=[clause], dtypes=["float32"]
    ).verdicts
    assert verdict.status == "fail"
    assert message in verdict.message


def test_replaced_functions_are_restored_and_reported() -> None:
    before = torch.softmax, torch.Tensor.softmax, torch.allclose
    clauses = ["SHP-1", "HED-1", "STA-5"]
    verdicts = check(
        hostile.replaces_softmax, "quick", clauses=clauses, dtypes=["float32"]
    ).verdicts
    assert [verdict.status for verdict in verdicts] == ["blocked", "blocked", "fail"]
    assert (torch.softmax, torch.Tensor.softmax, torch.allclose) == before
    loop = resolve("loop")[0].implementation
    assert check(loop, "quick", clauses=clauses, dtypes=["float32"]).conforms


def test_output_to_the_terminal_changes_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(hostile.shouts, "quick", clauses=["SHP-4"], dtypes=["float32"]).conforms
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_implementation_that_ends_its_process_fails_and_the_others_are_judged() -> None:
    names = ("loops", "segfaults", "exits_hard")
    targets = [f"{HOSTILE}:{name}" for name in names]
    done = run("-n", "1", "--timeout", "6", "-k", "SHP-1", "--mha-impl", *targets, "loop", *QUICK)
    assert done.returncode == 1, done.stdout
    for name in names:
        assert f"{name}: DOES NOT CONFORM: 1 of 1 answers is wrong" in done.stdout
    assert "fail            SHP-1   float32: judging did not end: " in done.stdout
    assert "Timeout" in done.stdout
    assert "crashed while running" in done.stdout
    assert "loop: CONFORMS: 1 answer right" in done.stdout


@pytest.mark.slow
def test_memory_limit_of_the_shell_fails_one_implementation() -> None:
    command = (
        f"ulimit -d 1500000; {sys.executable} -m pytest conformance -k SHP-1 --mha-impl"
        f" {HOSTILE}:hoards loop"
    )
    done = subprocess.run(["bash", "-c", f"{command} {' '.join(QUICK)}"], **HERE)  # type: ignore[call-overload]  # by keyword
    assert done.returncode == 1, done.stdout
    assert "fail            SHP-1   float32: the call raised RuntimeError" in done.stdout
    assert "not enough memory" in done.stdout or "t allocate memory" in done.stdout
    assert "loop: CONFORMS: 1 answer right" in done.stdout


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("workers", ["0", "1"])
def test_report_of_an_interrupted_run_has_the_verdicts_so_far(tmp_path: Path, workers: str) -> None:
    file = tmp_path / "report.json"
    targets = ("loop", f"{HOSTILE}_exceptions:presses_ctrl_c")
    done = run(
        "-k", "SHP-1", "-n", workers, "--mha-impl", *targets, "--mha-report", str(file), *QUICK
    )
    assert done.returncode == 2, done.stdout
    if workers == "0":
        assert "loop: INCOMPLETE, so far: CONFORMS: 1 answer right" in done.stdout
    report = json.loads(file.read_text())
    assert report["incomplete"]
    assert not report["conforms"]
    assert [(v["implementation"], v["clause"], v["status"]) for v in report["verdicts"]][:1] == [
        ("loop", "SHP-1", "pass")
    ]


ENDINGS = {
    "exits while it is imported": ("os._exit(0)", 2),
    "exits with the process": ("atexit.register(os._exit, 0)", 1),
    "replaces sys.exit": ("sys.exit = print", 1),
    "raises what is no Exception": ("raise GeneratorExit", 2),
    "leaves a thread": ("threading.Thread(target=time.sleep, args=(600,)).start()", 1),
}


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("ending", ENDINGS)
def test_exit_status_is_not_that_of_the_implementation(tmp_path: Path, ending: str) -> None:
    statement, status = ENDINGS[ending]
    file = tmp_path / "ending.py"
    file.write_text(
        f"import atexit, os, sys, threading, time\nfrom {HOSTILE} import"
        f" gives_nothing\n{statement}\n"
    )
    command = ["check", f"{file}:gives_nothing", "--clause", "SHP-1", "--profile", "quick"]
    done = run_module("mha.conformance.cli", *command, cwd=tmp_path)
    assert done.returncode == status, done
    assert "Traceback" not in done.stderr or statement.startswith("atexit"), done
