"""Judging in several processes: the same verdicts, in the same order, and a process that dies fails one clause."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from time import monotonic, sleep

import pytest

from mha.conformance.engine.judge import judge_all
from mha.conformance.engine.workers import Workers
from mha.conformance.results import Verdict
from mha.conformance.settings import Settings
from mha.implementations import resolve

SETTINGS = Settings(profile="quick", clauses=("CFG-1", "SHP-1", "SHP-5", "SMX-1", "MSK-8"), dtypes=("float32",))
DYING = """
import os
from mha.implementations.loop import implementation as loop

class Dying:
    name, claims = "dying", loop.claims

    def build(self, config, weights, *, dtype, device):
        attention = loop.build(config, weights, dtype=dtype, device=device)
        attention.register_forward_pre_hook(die)
        return attention

def die(module, inputs):
    if not inputs[0].numel():
        {end}

implementation = Dying()
"""


def timeless(verdicts: list[Verdict]) -> list[Verdict]:
    return [replace(verdict, seconds=0.0) for verdict in verdicts]


def test_several_processes_reach_the_same_verdicts_in_the_same_order() -> None:
    (vectorized,) = resolve("vectorized")
    with Workers(2) as workers:
        verdicts = list(workers.judge_all(vectorized, SETTINGS))
    assert timeless(verdicts) == timeless(list(judge_all(vectorized, SETTINGS)))


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("os._exit(3)", "its process exited (3)"),
        ("os.kill(os.getpid(), 11)", "its process was killed by SIGSEGV"),
    ],
)
def test_process_that_dies_fails_the_clause_at_hand(end: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "dying.py"
    file.write_text(DYING.format(end=end))
    (dying,) = resolve(f"{file}:implementation")
    with Workers(2) as workers:
        verdicts = list(workers.judge_all(dying, SETTINGS))
    failed = {verdict.clause: verdict.message for verdict in verdicts if verdict.status == "fail"}
    assert failed == {"SHP-5": f"judging did not end: {reason}"}
    assert [verdict.clause for verdict in verdicts] == list(SETTINGS.clauses)


def test_what_other_processes_cannot_find_is_judged_in_this_one() -> None:
    (loop,) = resolve("loop")
    with Workers(2) as workers:
        (verdict,) = workers.judge_all(replace(loop, target="nowhere.py:loop"), replace(SETTINGS, clauses=("SHP-1",)))
    assert verdict.status == "pass"


def test_interrupted_run_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mha.conformance", "check", "minimal", "--jobs", "2", "-v"]
    with Popen(command, cwd=tmp_path, stdout=PIPE, stderr=STDOUT, text=True, process_group=0) as running:
        assert running.stdout is not None
        assert any(" CFG-1 " in line for line in running.stdout)
        os.kill(running.pid, signal.SIGTERM)
        rest = running.stdout.read()
    assert running.returncode == 2
    assert "INCOMPLETE" in rest
    assert "Traceback" not in rest
    end = monotonic() + 30
    while _is_running(running.pid) and monotonic() < end:
        sleep(0.1)
    assert not _is_running(running.pid)


def _is_running(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
