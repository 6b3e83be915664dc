"""Several processes give the same verdicts in order; one that dies fails one clause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from time import monotonic, sleep
from typing import Any, ClassVar

import pytest
from torch import Tensor

from mha.conformance import check
from mha.conformance.cases.case import Case
from mha.conformance.engine.judge import judge_all
from mha.conformance.engine.replay import replay_case
from mha.conformance.engine.watch import why
from mha.conformance.engine.workers import (
    COMPILED,
    LONGEST,
    Ended,
    Workers,
    crashed,
    in_order_of_start,
)
from mha.conformance.faults import registry as faults
from mha.conformance.harness import isolation
from mha.conformance.results import Report, Verdict
from mha.conformance.settings import FIRST, Settings, Task
from mha.conformance.waivers import Waiver
from mha.implementations import Resolved, resolve
from mha.spec import Implementation, Output
from support.forks import run_module

SETTINGS = Settings(
    profile="quick", clauses=("CFG-1", "SHP-1", "SHP-5", "SMX-1", "MSK-8"), dtypes=("float32",)
)
DYING = """
import os
from mha.implementations.loop import implementation as loop

class Dying:
    name, claims = "dying", loop.claims

    def build(self, config, weights, *, dtype, device):
        attention = loop.build(config, weights, dtype=dtype, device=device)
        attention.register_forward_pre_hook(die)
        return attention

done = []

def die(module, inputs):
    if not inputs[0].numel() and not done:
        done.append(1)
        {end}

implementation = Dying()
"""


def timeless(verdicts: list[Verdict]) -> list[Verdict]:
    return [replace(verdict, seconds=0.0) for verdict in verdicts]


def test_what_finds_most_is_judged_first_unless_clauses_are_chosen() -> None:
    every = Settings(dtypes=("float32", "float64"))
    judged = [task.clause for task in every.tasks]
    assert judged[: len(FIRST)] == list(FIRST)
    assert sorted(judged) == sorted(2 * every.judged_clauses)
    assert [task.clause for task in SETTINGS.tasks] == list(SETTINGS.clauses)


def test_clauses_that_import_the_compiler_are_judged_by_one_process() -> None:
    tasks = Settings(profile="quick", dtypes=("float32",)).tasks
    waiting = in_order_of_start(tasks)
    assert sorted(waiting) == list(enumerate(tasks))
    soon = [*FIRST, *COMPILED, *LONGEST]
    assert [task.clause for _, task in waiting[: len(soon)]] == soon
    with Workers(2) as workers:
        one, other = workers.members
        compiled, plain = waiting[len(FIRST) :], waiting[-1]
        assert workers.next_for(one, compiled) == compiled[0]
        assert workers.next_for(other, compiled) == compiled[len(COMPILED)]
        assert workers.next_for(other, compiled[: len(COMPILED)]) is None
        assert workers.next_for(one, [plain]) == plain


def test_several_processes_reach_the_same_verdicts_in_the_same_order() -> None:
    (vectorized,) = resolve("vectorized")
    with Workers(2) as workers:
        verdicts = list(workers.judge_all(vectorized, SETTINGS))
    assert timeless(verdicts) == timeless(list(judge_all(vectorized, SETTINGS)))


def test_process_that_dies_fails_the_clause_at_hand(tmp_path: Path) -> None:
    with Workers(2) as workers:
        verdicts = list(workers.judge_all(dying(tmp_path, "os.kill(os.getpid(), 11)"), SETTINGS))
    failed = {verdict.clause: verdict.message for verdict in verdicts if verdict.status == "fail"}
    assert failed == {
        "SHP-5": "judging did not end: its process was ended by SIGSEGV, in die (dying.py, line 18)"
    }
    assert [verdict.clause for verdict in verdicts] == list(SETTINGS.clauses)


@pytest.mark.skipif(
    sys.platform != "linux", reason="only there are processes forked, with what is changed here"
)
def test_process_that_loses_its_gpu_fails_the_clause_at_hand_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize() -> None:
        if (tmp_path / str(os.getpid())).exists():
            raise RuntimeError("CUDA error: misaligned address")

    # As if a kernel had failed: the call returns, and whoever waits for the GPU afterwards gets the
    # error.
    monkeypatch.setattr(isolation.GPU, "is_initialized", lambda: True)
    monkeypatch.setattr(isolation.GPU, "synchronize", synchronize)
    losing = dying(tmp_path, f"open(f'{tmp_path}/{{os.getpid()}}', 'w').close()")
    with Workers(2) as workers:
        first = list(workers.members)
        verdicts = list(workers.judge_all(losing, SETTINGS))
        assert len(workers.members) == 2
        assert len(set(first) - set(workers.members)) == 1
    assert {verdict.clause: verdict.status for verdict in verdicts if verdict.status != "pass"} == {
        "SHP-5": "fail"
    }
    assert lost(verdicts[SETTINGS.clauses.index("SHP-5")])


def lost(verdict: Verdict) -> bool:
    """Whether it is that on the call that lost the GPU."""
    reason = (
        "the call raised RuntimeError: CUDA error: misaligned address, and its process can no"
        " longer use the GPU"
    )
    return verdict.message.startswith(reason) and str(verdict.case).startswith("Case(")


class Losing(faults.Correct):
    """Loses the GPU in a call with a mask that is broadcast over the keys."""

    done: ClassVar[list[int]]

    def forward(
        self, query: Tensor, key: Tensor, *rest: Any, mask: Tensor | None = None, **options: Any
    ) -> Output:
        self.done += [1] if mask is not None and mask.shape[-1] < key.shape[1] else []
        return super().forward(query, key, *rest, mask=mask, **options)


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> Implementation:
    done: list[int] = []

    def synchronize() -> None:
        if done:
            raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(Losing, "done", done, raising=False)
    monkeypatch.setattr(isolation.GPU, "is_initialized", lambda: True)
    monkeypatch.setattr(isolation.GPU, "synchronize", synchronize)
    return faults.implementation_of(Losing)


def test_nothing_is_judged_by_a_process_that_lost_its_gpu(losing: Implementation) -> None:
    options: Any = {"profile": "quick", "dtypes": "float32"}
    before, at, after = check(losing, clauses=["SHP-1", "MSK-5", "NUM-1"], **options).verdicts
    assert (before.status, at.status, after.status) == ("pass", "fail", "harness_error")
    assert lost(at)  # and no refusal of a mask, which MSK-5 would accept
    assert "mha check replaces it" in after.message
    (other,) = check("loop", clauses="SHP-1", **options).verdicts
    assert other.status == "harness_error"


def test_waiver_of_some_cases_covers_one_that_loses_the_gpu(losing: Implementation) -> None:
    known = Waiver(
        implementation=losing.name,
        clause="MSK-5",
        reason="known",
        error="misaligned",
        where="S > 1",
    )
    (verdict,) = check(losing, "quick", clauses="MSK-5", dtypes="float32", waivers=[known]).verdicts
    assert verdict.status == "waived"
    assert lost(verdict)


def test_case_that_loses_the_gpu_fails_again(losing: Implementation) -> None:
    case, violated = Case(L=2, S=2, mask="empty_or_full"), "mask_of_one_key_is_expanded_or_refused"
    outcome, message = replay_case(losing, "MSK-5", case, violated=violated)
    assert (outcome, message) == (
        "FAILS",
        "the call raised RuntimeError: CUDA error: misaligned address",
    )


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (None, "its process closed its output"),
        (3, "its process exited with status 3"),
        (-11, "its process was ended by SIGSEGV"),
        (-40, "its process was ended by signal 40"),
    ],
)
def test_verdict_on_a_crash_heeds_levels_and_waivers(status: int | None, reason: str) -> None:
    (loop,), task = resolve("loop"), Task("SHP-5", "float32", "cpu")
    ended = Ended(why(status), status)
    failed = crashed(loop, task, SETTINGS, ended)
    assert (failed.status, failed.message) == ("fail", f"judging did not end: {reason}")
    assert failed.conforms  # since SHP-5 is a SHOULD
    assert not crashed(loop, task, replace(SETTINGS, strict=True), ended).conforms
    waiver = Waiver(implementation="loop", clause="SHP-5", reason="known")
    assert crashed(loop, task, replace(SETTINGS, waivers=(waiver,)), ended).status == "waived"


def test_process_that_was_killed_is_not_blamed_on_the_implementation() -> None:
    verdict = crashed(
        resolve("loop")[0], Task("SHP-5", "float32", "cpu"), SETTINGS, Ended(why(-9), -9)
    )
    assert verdict.status == "harness_error"
    assert verdict.message.endswith("its process was killed (SIGKILL), perhaps for want of memory")


def test_target_that_cannot_be_found_is_refused() -> None:
    (loop,) = resolve("loop")
    with Workers(2) as workers, pytest.raises(ValueError, match=r"there is no file 'nowhere\.py'"):
        next(workers.judge_all(replace(loop, target="nowhere.py:loop"), SETTINGS))


def dying(folder: Path, code: str) -> Resolved:
    """Return an implementation that runs this code when a batch is empty, as in SHP-5."""
    file = folder / "dying.py"
    file.write_text(DYING.format(end=code))
    return resolve(f"{file}:implementation")[0]


def test_implementation_may_start_processes_of_its_own_and_print(tmp_path: Path) -> None:
    file = tmp_path / "noisy.py"
    code = "print('hidden'); os.write(1, b'noise'); "
    code += "import multiprocessing as m; p = m.get_context('fork').Process(); p.start(); p.join()"
    file.write_text(DYING.format(end=code))
    command = ["check", f"{file}:implementation", "--jobs", "2"]
    command += ["--clause", "SHP-5,SHP-1", "--dtype", "float32", "--json", "-"]
    done = run_module("mha.conformance", *command, cwd=tmp_path)
    assert done.returncode == 0
    assert Report.from_json(done.stdout).conforms
    assert "noise" in done.stderr
    assert "hidden" not in done.stderr


# Writes to a pipe that nobody reads, and reads from standard input.
CLOSED = """
        reading, writing = os.pipe()
        os.close(reading)
        try:
            os.write(writing, b"x")
        except BrokenPipeError:
            assert os.read(0, 1) == b""
            os.write(2, b"as usual")
"""


def test_what_is_judged_finds_signals_and_standard_input_as_in_a_process_of_its_own(
    tmp_path: Path,
) -> None:
    file = tmp_path / "pipes.py"
    file.write_text(DYING.format(end=CLOSED.strip()))
    command = [
        sys.executable,
        "-m",
        "mha.conformance",
        "check",
        f"{file}:implementation",
        "--jobs",
        "2",
    ]
    command += ["--clause", "SHP-5,SHP-1", "--dtype", "float32"]
    done = subprocess.run(
        command, input="hello", cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "as usual" in done.stderr


def test_process_that_cannot_import_it_leaves_it_to_the_others(tmp_path: Path) -> None:
    once = (
        "try:\n    open(__file__ + '.once', 'x').close()\nexcept FileExistsError:\n   "
        " os._exit(7)\n"
    )
    file = tmp_path / "once.py"
    file.write_text(DYING.format(end="pass") + once)
    with Workers(2) as workers:
        (resolved,) = workers.find([f"{file}:implementation"]).chosen.values()
        assert {verdict.status for verdict in workers.judge_all(resolved, SETTINGS)} == {"pass"}


def test_no_module_of_the_current_folder_is_taken_for_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("random.py").write_text("1 / 0")
    (loop,) = resolve("loop")
    with Workers(2) as workers:
        assert {verdict.status for verdict in workers.judge_all(loop, SETTINGS)} == {"pass"}
        assert len(workers.members) == 2


@pytest.mark.slow
def test_verdicts_that_wait_for_their_turn_are_kept(tmp_path: Path) -> None:
    with Workers(2) as workers:
        judged = workers.judge_all(dying(tmp_path, "import time; time.sleep(5)"), SETTINGS)
        assert [next(judged).clause for _ in range(3)] == ["CFG-1", "SHP-1", "SHP-5"]
        judged.close()
    assert {verdict.clause for verdict in workers.unread} == {"SMX-1", "MSK-8"}


@pytest.mark.mostly_slow(1)
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are found in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_run_that_ends_early_leaves_no_process_behind(
    number: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "mha.conformance", "check", "minimal", "--jobs", "2", "-v"]
    with Popen(command, cwd=tmp_path, stdout=PIPE, stderr=STDOUT, text=True) as running:
        assert running.stdout is not None
        assert any(" MSK-2 " in line for line in running.stdout)
        started = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        assert len(started) == 2
        # They are forks of the command, not a Python each.
        assert {command_of(process) for process in (str(running.pid), *started)} == {
            command_of(str(running.pid))
        }
        running.send_signal(number)
        rest = running.stdout.read()
    assert "Traceback" not in rest
    if number == signal.SIGTERM:
        assert running.returncode == 2
        assert "INCOMPLETE" in rest
    end = monotonic() + 60
    while any(map(is_running, started)) and monotonic() < end:
        sleep(0.1)
    assert not any(map(is_running, started))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are found in /proc")
def test_process_that_hangs_ends_with_a_command_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(
        "import time\nfrom pathlib import Path\nfrom mha.spec import Claims\n\n"
        "class Hangs:\n"
        "    name, claims = 'hangs', Claims()\n"
        "    def build(self, *sizes, **options):\n"
        "        if Path('judged').exists():\n"
        "            Path('hanging').touch()\n"
        "            time.sleep(600)\n"
        "        Path('judged').touch()\n"
        "        raise ValueError\n\n"
        "implementation = Hangs()\n"
    )
    command = [
        sys.executable,
        "-m",
        "mha.conformance",
        "check",
        "hangs.py:implementation",
        "--jobs",
        "2",
    ]
    with Popen(command, cwd=tmp_path, stdout=DEVNULL, stderr=DEVNULL) as running:
        end = monotonic() + 60
        while not (tmp_path / "hanging").exists() and monotonic() < end:
            sleep(0.1)
        started = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        assert len(started) == 2
        running.kill()
    end = monotonic() + 30
    while any(map(is_running, started)) and monotonic() < end:
        sleep(0.1)
    assert not any(map(is_running, started))


def command_of(process: str) -> str:
    """Return how a process was started."""
    return Path(f"/proc/{process}/cmdline").read_text()


def is_running(process: str) -> bool:
    """Return whether a process has not ended; one that nobody has waited for has."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
