"""Code that ends, blocks or replaces its process: every front end says so, and loses no verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from subprocess import DEVNULL, Popen
from time import monotonic, sleep

import pytest

from mha.conformance.cases.case import Case
from mha.conformance.engine.replay import replay_case
from mha.conformance.faults.hostile_changes import CHANGING
from mha.conformance.reports.files import LAST, read, save_last
from mha.conformance.reports.journal import NAMES, journal
from mha.conformance.results import Report, Verdict
from mha.implementations.process.clock import CLOCK
from support.forks import run_module

PROCESSES = "mha.conformance.faults.hostile_processes"
# In seconds; a call that is not wrong takes a few milliseconds, but machines of CI may stand still
# for a while.
LIMITED = "[tool.mha]\ncall_timeout = 5\n"
# What ends a process at each call: the reason that is given, and the status.
ENDS = {
    "exits_in_c": ("its process exited with status 0", 1),
    "runs_another_program": ("its process exited with status 0", 1),
    "kills_itself": ("its process was killed", 2),
    "stops_itself": ("a call did not return within 5 s", 1),
    "holds_the_interpreter": ("a call did not return within 5 s", 1),
    "closes_descriptors": ("its process exited with status 1", 1),
    "writes_to_descriptors": ("its process sent something else than the verdict", 1),
}
CLAUSE = "--profile", "quick", "--dtype", "float32", "--clause", "SHP-1"


@pytest.fixture
def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a project in which calls are ended after a few seconds."""
    (tmp_path / "pyproject.toml").write_text(LIMITED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("name", ENDS)
def test_process_that_ends_or_blocks_fails_its_clause(limited: Path, name: str) -> None:
    reason, status = ENDS[name]
    done = run_module(
        "mha.conformance", "check", f"{PROCESSES}:{name}", "loop", *CLAUSE, cwd=limited
    )
    assert done.returncode == status, done
    assert reason in " ".join(done.stdout.split())
    assert "loop: CONFORMS: 1 answer right" in done.stdout
    assert {each.implementation for each in read(LAST).verdicts} == {name, "loop"}


@pytest.mark.slow
def test_process_that_ends_later_is_not_taken_for_one_that_judged(limited: Path) -> None:
    options = "--profile", "quick", "--dtype", "float32", "--clause", "SHP"
    done = run_module(
        "mha.conformance", "check", f"{PROCESSES}:ends_later", "loop", *options, cwd=limited
    )
    assert done.returncode in (1, 2), done
    assert {each.status for each in read(LAST).verdicts if each.implementation == "loop"} == {
        "pass"
    }


@pytest.mark.slow
def test_fork_that_comes_back_ends() -> None:
    code = f"from {PROCESSES} import forks_and_goes_on as fork; from mha.conformance import check; "
    code += "print(check(fork, 'quick', clauses='SHP-1', dtypes='float32').conforms)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True\n"
    assert not CLOCK.times[0]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="descendants are found in /proc")
def test_processes_that_were_started_end_with_the_command(limited: Path) -> None:
    done = run_module(
        "mha.conformance", "check", f"{PROCESSES}:leaves_processes", *CLAUSE, cwd=limited
    )
    assert done.returncode == 0, done
    assert_none_is_left()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only there is a run forked")
def test_processes_that_were_started_end_with_a_run_of_pytest(limited: Path) -> None:
    options = (
        "--mha-profile",
        "quick",
        "--mha-dtype",
        "float32",
        "--mha-impl",
        f"{PROCESSES}:leaves_processes",
    )
    done = run_module("pytest", *PYTEST, *options, cwd=limited)
    assert done.returncode == 0, done
    assert_none_is_left()


def assert_none_is_left() -> None:
    commands = [_command(Path("/proc", name)) for name in os.listdir("/proc")]
    assert b"sleep\x003601\x00" not in commands


def _command(folder: Path) -> bytes:
    try:
        return (folder / "cmdline").read_bytes()
    except OSError:
        return b""


IMPORTS = {
    "import os; os._exit(0)": "its process exited with status 0",
    "import ctypes; ctypes.string_at(0)": (
        "its process was ended by SIGSEGV, in <module> (mine.py, line 1)"
    ),
    "import time; time.sleep(600)": (
        "it was not imported within 6 s (call_timeout = 1), in <module> (mine.py, line 1)"
    ),
}


@pytest.mark.mostly_slow(3)
@pytest.mark.skipif(sys.platform != "linux", reason="only there are processes forked")
@pytest.mark.parametrize("verb", ["check", "init"])
@pytest.mark.parametrize("code", IMPORTS)
def test_import_that_ends_or_blocks_its_process_is_refused(
    limited: Path, code: str, verb: str
) -> None:
    (limited / "pyproject.toml").write_text(LIMITED.replace("5", "1"))
    (limited / "mine.py").write_text(code)
    done = run_module("mha.conformance", verb, "mine.py:Mine", cwd=limited)
    assert done.returncode == 2, done
    assert IMPORTS[code] in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


PYTEST = (
    "--pyargs",
    "mha.conformance",
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-k",
    "SHP-1 or SHP-3",
)


@pytest.mark.mostly_slow(1)
@pytest.mark.skipif(sys.platform != "linux", reason="only there is a run forked")
@pytest.mark.parametrize("name", ["exits_in_c", "runs_another_program", "stops_itself"])
def test_run_of_pytest_that_vanishes_is_red(limited: Path, name: str) -> None:
    options = (
        "--mha-profile",
        "quick",
        "--mha-dtype",
        "float32",
        "--mha-impl",
        "loop",
        f"{PROCESSES}:{name}",
    )
    done = run_module("pytest", *PYTEST, *options, cwd=limited)
    assert done.returncode == 2, done
    said = " ".join((done.stdout + done.stderr).split())
    assert f"the run ended early, in the code to be judged: {ENDS[name][0]}" in said
    assert f"while it judged SHP-1 of {name}; what was reached is in" in said
    report = read(LAST)
    assert report.incomplete
    assert {(each.implementation, each.status) for each in report.verdicts} == {
        ("loop", "pass"),
        (name, "fail"),
    }


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only there is a worker watched")
def test_worker_of_xdist_ends_where_a_call_does_not_return(limited: Path) -> None:
    (limited / "pyproject.toml").write_text(LIMITED.replace("5", "2"))
    targets = "loop", "mha.conformance.faults.hostile:loops"
    options = "-n", "1", "--mha-profile", "quick", "--mha-dtype", "float32", "--mha-impl", *targets
    done = run_module(
        "pytest", "--pyargs", "mha.conformance", "-q", "-k", "SHP-1", *options, cwd=limited
    )
    assert done.returncode == 1, done
    assert "mha: a call did not return within 2 s (call_timeout = 2)" in done.stderr
    assert [each.status for each in read(LAST).verdicts] == ["pass", "fail"]


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="only there do such calls end their process alone"
)
def test_run_that_xdist_gives_up_is_incomplete(limited: Path) -> None:
    targets = f"{PROCESSES}:exits_in_c", "loop"
    options = (
        "-n",
        "1",
        "--max-worker-restart",
        "0",
        "--mha-profile",
        "quick",
        "--mha-dtype",
        "float32",
    )
    done = run_module(
        "pytest",
        "--pyargs",
        "mha.conformance",
        "-k",
        "SHP-1",
        *options,
        "--mha-impl",
        *targets,
        cwd=limited,
    )
    assert done.returncode == 1, done
    report = read(LAST)
    assert report.incomplete
    assert [each.status for each in report.verdicts] == ["fail"]


def test_run_that_was_killed_keeps_its_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [
        sys.executable,
        "-m",
        "mha.conformance",
        "check",
        "loop",
        "--profile",
        "quick",
        "--jobs",
        "1",
    ]
    with Popen(command, stdout=DEVNULL, stderr=DEVNULL) as running:
        end = monotonic() + 120
        while _lines() < 3 and monotonic() < end:
            sleep(0.05)
        running.send_signal(signal.SIGKILL)
    assert list(LAST.parent.glob(NAMES))
    report = read(LAST)
    assert report.incomplete
    assert report.verdicts
    assert {each.status for each in report.verdicts} <= {"pass", "not_claimed"}
    assert not list(LAST.parent.glob(NAMES))


def _lines() -> int:
    return sum(len(file.read_text().splitlines()) for file in LAST.parent.glob(NAMES))


def test_journal_of_a_run_that_ends_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with journal(tmp_path) as kept:
        kept.start(Report(verdicts=(), profile="quick", seed=0, versions={}))
        kept.note(
            Verdict(
                implementation="x",
                clause="SHP-1",
                level="MUST",
                dtype="float32",
                device="cpu",
                status="pass",
            )
        )
        assert len(list(LAST.parent.glob(NAMES))) == 1
        with pytest.raises(ValueError, match="no run is saved"):  # it goes on
            read(LAST)
    assert not list(LAST.parent.glob(NAMES))


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("output", [">&-", "2>&- <&-", "> /dev/full"])
def test_output_that_cannot_be_written_loses_no_report(tmp_path: Path, output: str) -> None:
    command = f"{sys.executable} -m mha.conformance check loop {' '.join(CLAUSE)} {output}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == (2 if "full" in output else 0), done
    assert "Traceback" not in done.stderr
    assert read(tmp_path / LAST).verdicts


def test_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    command = (
        f"rmdir {folder}; {sys.executable} -P -m mha.conformance check loop {' '.join(CLAUSE)}"
    )
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2, done
    assert "mha: the current folder does not exist any more" in done.stderr
    assert "Traceback" not in done.stderr


SENDING = """
import signal
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in the command
from mha.conformance.engine.worker import Worker
worker = Worker.started()
worker.process.kill()
worker.process.wait()
for _ in range(3):
    worker.send("x" * 1_000_000)
print("sent")
"""


def test_message_to_a_process_that_has_ended_does_not_end_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SENDING], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "sent\n"), done


def ended_process() -> int:
    """Return the number of a process that has ended."""
    with Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def write_journal(folder: Path, *lines: object) -> None:
    (folder / LAST.parent).mkdir()
    place = folder / LAST.parent / NAMES.replace("*", f"{ended_process()}-0")
    place.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )


VERDICT = Verdict(
    implementation="x", clause="SHP-1", level="MUST", dtype="float32", device="cpu", status="fail"
)
EMPTY = Report(verdicts=(), profile="quick", seed=0, versions={}, incomplete=True)


@pytest.mark.parametrize(
    "line", ["", "[]", "{}", "[" * 5000, '{"clause": []}', "null", '{"clause": "SHP-1"']
)
def test_journal_that_cannot_be_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_journal(tmp_path, line)
    with pytest.raises(ValueError, match="no run is saved"):
        read(LAST)
    LAST.parent.rename("other")
    write_journal(tmp_path, asdict(EMPTY), line, asdict(VERDICT))
    assert [each.status for each in read(LAST).verdicts] == ["fail"]


def test_journal_of_another_folder_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    write_journal(other, asdict(EMPTY), asdict(VERDICT))
    LAST.parent.symlink_to(other / LAST.parent)
    with pytest.raises(ValueError, match="no run is saved"):
        read(LAST)
    assert len(list((other / LAST.parent).iterdir())) == 1


def test_journal_of_a_process_that_cannot_be_is_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_journal(tmp_path, asdict(EMPTY), asdict(VERDICT))
    (journal,) = LAST.parent.iterdir()
    journal.rename(journal.with_name(f"run-{10**30}-0.jsonl"))
    assert read(LAST).verdicts


@pytest.mark.parametrize("is_absolute", [True, False])
def test_run_that_was_ended_before_is_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_absolute: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    write_journal(tmp_path, asdict(EMPTY), asdict(VERDICT))
    save_last(
        replace(EMPTY, verdicts=(replace(VERDICT, status="pass"),), incomplete=False),
        Path().absolute(),
    )
    report = read(LAST.absolute() if is_absolute else LAST)
    assert [each.status for each in report.verdicts] == ["pass"]
    assert not report.incomplete


def test_replay_of_code_that_changes_the_judge_fails() -> None:
    implementation, _ = CHANGING["replaces_a_function"]
    assert replay_case(implementation, "SHP-1", Case()).outcome == "FAILS"


@pytest.mark.skipif(sys.platform != "linux", reason="only there is a run forked")
def test_status_of_pytest_cannot_be_written_by_what_is_judged(limited: Path) -> None:
    options = (
        "--mha-profile",
        "quick",
        "--mha-dtype",
        "float32",
        "--mha-impl",
        f"{PROCESSES}:writes_to_descriptors",
    )
    done = run_module("pytest", *PYTEST, *options, cwd=limited)
    assert done.returncode == 2, done
    assert "wrote to the pipe of its exit status what is not one" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only there is a run forked")
@pytest.mark.parametrize(
    ("option", "status"), [("--help", 0), ("--markers", 0), ("--no-such-option", 4)]
)
def test_run_of_pytest_without_a_session_keeps_its_status(
    tmp_path: Path, option: str, status: int
) -> None:
    done = run_module("pytest", *PYTEST, "--mha-impl", "loop", option, cwd=tmp_path)
    assert done.returncode == status, done
    assert "ended early" not in done.stderr
