"""`mha watch`: what is judged after a save, what is said meanwhile, and which files count."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mha.conformance.cli import watched_files
from mha.conformance.cli.check import CheckOptions, Stop
from mha.conformance.cli.watch import Saved, Watch
from mha.conformance.cli.watched_files import WatchedFiles
from mha.conformance.engine.ahead import Ahead
from mha.conformance.engine.found import Found
from mha.conformance.reports.files import LAST
from mha.conformance.results import Report, Verdict
from mha.conformance.settings import Settings
from mha.implementations import Resolved
from support.reports_made import verdict

SETTINGS = Settings(profile="quick", clauses=("SHP-1", "MSK-1", "CAU-1"), dtypes=("float32",))
KERNEL = "def kernel(q, k, v):\n    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v\n"
OPTIONS = CheckOptions(stop=Stop(first=True))
SYNTAX_ERROR = "'mine.py' cannot be run: SyntaxError: '(' was never closed (mine.py, line 3)"


class Target:
    """An implementation of which only the name counts."""

    name = "mine"


class StubWorkers:
    """Workers that find a target, and give verdicts, as a script says.

    script: for each run, what returns the clauses that fail, or raises.
    judged: the profile and the clauses of each look.
    """

    def __init__(self, *script: Callable[[], set[str]]) -> None:
        self.script, self.judged = list(script), list[tuple[str, ...]]()
        self.files, self.declarations = dict[str, str](), dict[str, str]()
        self.failing = set[str]()
        self.ahead, self.asked = Ahead(), list[list[str]]()
        self.heard_at_once: Callable[[Verdict], object] = bool

    def find(self, targets: object) -> Found:
        """Find the target, or raise what the script does."""
        self.failing = self.script.pop(0)()
        implementation: Any = Target()
        return Found({"mine": Resolved(implementation, "mine.py:kernel")}, (), {}, ())

    def judge_all(self, resolved: Resolved, settings: Settings) -> Iterator[Verdict]:
        """Yield a verdict on each clause."""
        self.judged.append((settings.profile, *settings.judged_clauses))
        for clause in settings.judged_clauses:
            status = "fail" if clause in self.failing else "pass"
            found = verdict("mine", clause, status, message="wrong")
            if status == "fail":
                self.heard_at_once(replace(found, message="seen"))
            yield found

    def afresh(self) -> None:
        """Have new processes, and note what one would judge while the others infer."""
        self.asked.append([f"{look.profile} {task.clause}" for task, look in self.ahead.tasks])


def failing(*clauses: str) -> Callable[[], set[str]]:
    """Return a part of a script."""
    return lambda: set(clauses)


def stopped() -> set[str]:
    """Be stopped by Ctrl-C."""
    raise KeyboardInterrupt


def unusable() -> set[str]:
    """Not be imported."""
    raise ValueError(SYNTAX_ERROR)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a file in a folder of its own, and be there; it counts as saved after each run."""

    def wait(watch: Watch) -> None:
        raise Saved("mine.py")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Watch, "wait", wait)
    monkeypatch.setattr(watched_files, "POLL", 0.0)
    file = tmp_path / "mine.py"
    file.write_text(KERNEL)
    return file


def watched(*script: Callable[[], set[str]]) -> tuple[int, list[tuple[str, ...]]]:
    """Return the status, and the looks, where the file is saved after each part of a script."""
    status, workers = watching(*script)
    return status, workers.judged


def watching(*script: Callable[[], set[str]]) -> tuple[int, StubWorkers]:
    """Return the status, and the workers at the end."""
    workers: Any = StubWorkers(*script, stopped)
    files = WatchedFiles("mine.py:kernel")
    return Watch("mine.py:kernel", SETTINGS, OPTIONS, workers, files).run(), workers


ALL = ("SHP-1", "MSK-1", "CAU-1")


def test_a_right_file_is_judged_briefly_and_then_in_full(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, looks = watched(failing())
    assert status == 0
    assert looks == [("smoke", *ALL), ("quick", *ALL)]
    output = capsys.readouterr().out
    assert "a first look at 3 clauses found no failure; now profile quick  [0." in output
    assert "\nmine: CONFORMS: all 3 answers right.\n" in output


def test_what_failed_last_is_judged_first_and_said_once(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, looks = watched(failing("MSK-1", "CAU-1"), failing("CAU-1"), failing())
    first, second, third = [("smoke", *ALL)], ("smoke", "MSK-1", "CAU-1"), ("smoke", "CAU-1")
    assert looks == [*first, second, *first, third, *first, ("quick", *ALL)]
    assert status == 0
    runs = capsys.readouterr().out.split("mine.py saved")
    assert [text.count("mine: DOES NOT CONFORM") for text in runs] == [1, 1, 0, 0]
    assert [text.count("mended: CAU-1") for text in runs] == [0, 0, 1, 0]
    # The first failure as soon as it is found, and again in the summary.
    assert [text.count("fail            CAU-1   float32: wrong") for text in runs] == [1, 2, 0, 0]
    assert Report.from_json(LAST.read_text()).conforms


def test_a_failing_case_is_told_before_it_is_explained_and_once(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched(failing("MSK-1", "CAU-1"))
    output = capsys.readouterr().out
    told, _, rest = output.partition("a case fails    MSK-1   float32: seen  [")
    assert "fail" not in told
    assert "a case fails" not in rest
    assert "fail            MSK-1   float32: wrong  [" in rest


def test_what_failed_in_any_version_is_looked_at_first(file: Path) -> None:
    _, workers = watching(failing("MSK-1", "CAU-1"), failing(), failing())
    first = ("smoke", *ALL)
    again, later = ("smoke", "MSK-1", "CAU-1"), [("smoke", "MSK-1", "CAU-1"), first]
    assert workers.judged == [first, again, first, ("quick", *ALL), *later, ("quick", *ALL)]
    # And before the next version is understood, as this one was.
    of_all = [f"smoke {clause}" for clause in ALL]
    assert workers.asked == [["smoke MSK-1", "smoke CAU-1", *of_all]] * 3


def test_a_few_failures_end_a_run(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, looks = watched(failing(*ALL), failing(*ALL))
    assert looks == [("smoke", *ALL), ("smoke", *ALL)]
    assert status == 1
    assert "mine: INCOMPLETE, so far: DOES NOT CONFORM" in capsys.readouterr().out


def test_a_file_that_cannot_be_used_is_waited_for(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, looks = watched(failing("MSK-1"), unusable)
    assert (status, len(looks)) == (2, 1)
    assert (
        "mha: 'mine.py' cannot be run: SyntaxError: '(' was never closed (mine.py, line 3)\n"
        in (capsys.readouterr().out)
    )
    # And what failed before is still known.
    assert watched(failing("MSK-1"), unusable, failing())[1][1] == ("smoke", "MSK-1")


def test_a_save_ends_a_run(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judge_all = StubWorkers.judge_all

    def interrupted(workers: StubWorkers, *given: Any) -> Iterator[Verdict]:
        yield from judge_all(workers, *given)
        if len(workers.judged) == 1:
            raise Saved("other.py")

    monkeypatch.setattr(StubWorkers, "judge_all", interrupted)
    _, looks = watched(failing("CAU-1"), failing("CAU-1"))
    assert looks == [("smoke", *ALL), ("smoke", "CAU-1"), ("smoke", *ALL)]
    output = capsys.readouterr().out
    assert output.count("DOES NOT CONFORM") == 1
    assert "other.py saved" in output


def replaced(file: Path, text: str) -> None:
    """Write a file as editors do: another one, that takes its name."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


def test_files_count_as_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watched_files, "POLL", 0.0)
    file, helper, late = (tmp_path / name for name in ("mine.py", "helper.py", "late.py"))
    file.write_text(f"import helper\n{KERNEL}")
    helper.write_text("")
    late.write_text("")
    files = WatchedFiles("mine.py:kernel")
    assert files.names() == "mine.py and 1 file that it imports"
    assert files.saved() == []
    helper.write_text("x = 1\n")
    assert files.saved() == [str(helper)]
    files.settle()
    assert files.saved() == []
    replaced(file, file.read_text())
    assert files.saved() == [str(file)]
    file.unlink()
    files.settle()
    assert files.saved() == []
    file.write_text(KERNEL)
    assert files.saved() == [str(file)]
    files.settle()
    files.add({str(late): "late.py"}, since=os.stat(late).st_mtime_ns)
    assert files.saved() == []


def test_a_file_that_was_saved_while_it_was_read_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(KERNEL)
    late = tmp_path / "late.py"
    late.write_text("")
    files = WatchedFiles("mine.py:kernel")
    files.add({str(late): "late.py"}, since=os.stat(late).st_mtime_ns - 1)
    assert files.saved() == [str(late)]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("sdpa", "'sdpa' names no file to watch; give file.py:NAME, or package.module:NAME"),
        ("torch.nn:MultiheadAttention", "there is no file of yours behind"),
        ("nowhere.module:Attention", "there is no file of yours behind"),
    ],
)
def test_a_target_without_a_file_is_refused(target: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WatchedFiles(target)


def test_saves_are_judged_until_the_command_is_stopped(tmp_path: Path) -> None:
    """As a process, on what it imports too; SIGTERM does what Ctrl-C does."""
    file, helper = tmp_path / "mine.py", tmp_path / "helper.py"
    file.write_text(f"import helper\n\n\n{KERNEL.rstrip()}[..., : helper.WIDTH]\n")
    helper.write_text("WIDTH = 999\n")
    command = [sys.executable, "-m", "mha.conformance", "watch", "mine.py:kernel", "--jobs", "1"]
    command += ["--clause", "SHP-1", "--profile", "smoke"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as running:
        lines = iter(running.stdout or ())

        def until(text: str) -> str:
            read = ""
            while text not in read:
                read += next(lines)
            return read

        assert "kernel: CONFORMS" in until("watching mine.py and 1 file that it imports")
        helper.write_text("WIDTH = 0x1\n")  # in the same second, and as long
        output = until("watching")
        assert "helper.py saved\n" in output
        assert "judged as it was understood before\n    kernel needs a declaration: " in output
        assert "fail            SHP-1" in output.partition("kernel: DOES NOT CONFORM")[0]
        replaced(helper, "WIDTH = (\n")
        assert "(helper.py, line 1)" in until("watching")
        running.send_signal(signal.SIGTERM)
    assert running.returncode == 2
