"""Implementations that work against the suite get their own verdict, and no other verdict is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forks import run_module
from test_front_end import HERE, QUICK, run

from mha.conformance import check
from mha.conformance.faults import hostile
from mha.implementations import resolve

HOSTILE = "mha.conformance.faults.hostile"
MESSAGES = {
    "exits": ("SHP-1", "the call raised SystemExit"),
    "closes": ("SHP-1", "the call raised GeneratorExit"),
    "gives_nothing": ("SHP-1", "but should return Output(output, weights)"),
    "gives_elsewhere": ("SHP-1", "output_2.device is meta, but should be cpu"),
    "gives_lazy": ("SHP-1", "output_2 is of type Lazy, but should be a tensor"),
    "writes_later": ("NUM-1", "but should be"),
    "replaces_comparisons": ("STA-5", "the call replaced torch.Tensor.all, torch.allclose, torch.equal, for everybody"),
    "replaces_softmax": ("STA-5", "the call replaced torch.Tensor.softmax, torch.softmax, for everybody"),
    "seeks_the_oracle": ("NUM-1", "but should be"),
}


@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize("name", MESSAGES)
def test_hostile_implementation_fails_with_its_own_message(name: str) -> None:
    clause, message = MESSAGES[name]
    (verdict,) = check(getattr(hostile, name), "quick", clauses=[clause], dtypes=["float32"]).verdicts
    assert verdict.status == "fail"
    assert message in verdict.message


def test_replaced_functions_are_restored_and_reported() -> None:
    before = torch.softmax, torch.Tensor.softmax, torch.allclose
    clauses = ["SHP-1", "HED-1", "STA-5"]
    verdicts = check(hostile.replaces_softmax, "quick", clauses=clauses, dtypes=["float32"]).verdicts
    assert [verdict.status for verdict in verdicts] == ["blocked", "blocked", "fail"]
    assert (torch.softmax, torch.Tensor.softmax, torch.allclose) == before
    loop = resolve("loop")[0].implementation
    assert check(loop, "quick", clauses=clauses, dtypes=["float32"]).conforms


def test_output_to_the_terminal_changes_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(hostile.shouts, "quick", clauses=["SHP-4"], dtypes=["float32"]).conforms
    assert capsys.readouterr().out == ""


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


def test_memory_limit_of_the_shell_fails_one_implementation() -> None:
    command = f"ulimit -d 1500000; {sys.executable} -m pytest conformance -k SHP-1 --mha-impl {HOSTILE}:hoards loop"
    done = subprocess.run(["bash", "-c", f"{command} {' '.join(QUICK)}"], **HERE)  # type: ignore[call-overload]  # by keyword
    assert done.returncode == 1, done.stdout
    assert "fail            SHP-1   float32: the call raised RuntimeError" in done.stdout
    assert "not enough memory" in done.stdout or "t allocate memory" in done.stdout
    assert "loop: CONFORMS: 1 answer right" in done.stdout


@pytest.mark.parametrize("workers", ["0", "1"])
def test_report_of_an_interrupted_run_has_the_verdicts_so_far(tmp_path: Path, workers: str) -> None:
    file = tmp_path / "report.json"
    targets = ("loop", f"{HOSTILE}:interrupts")
    done = run("-k", "SHP-1", "-n", workers, "--mha-impl", *targets, "--mha-report", str(file), *QUICK)
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


@pytest.mark.parametrize("ending", ENDINGS)
def test_exit_status_is_not_that_of_the_implementation(tmp_path: Path, ending: str) -> None:
    statement, status = ENDINGS[ending]
    file = tmp_path / "ending.py"
    file.write_text(f"import atexit, os, sys, threading, time\nfrom {HOSTILE} import gives_nothing\n{statement}\n")
    command = ["check", f"{file}:gives_nothing", "--clause", "SHP-1", "--profile", "quick"]
    done = run_module("mha.conformance.cli", *command, cwd=tmp_path)
    assert done.returncode == status, done
    assert "Traceback" not in done.stderr or statement.startswith("atexit"), done
