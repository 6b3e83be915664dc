"""Judging in several processes: each judges a clause at a time, and fails only that clause if it crashes.

A process is a Python of its own: it starts, and imports torch, while the command does. Tasks and verdicts are pickled
to its standard input and from its standard output; what an implementation prints goes to standard error.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from subprocess import PIPE
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from mha.conformance.results import Verdict
    from mha.conformance.settings import Settings, Task
    from mha.implementations import Resolved

    Answers = SimpleQueue[tuple["Worker", Any]]

# More of them take more memory than they save time.
MAX_WORKERS = 8
# In seconds, for a process whose output has ended.
EXIT_TIMEOUT = 2.0
# Those that import the compiler go to one process, since that takes each of them a second.
COMPILED = ("CMP-1", "CMP-2", "CMP-3")
COMMAND = (sys.executable, "-P", "-c", "from mha.conformance.engine.workers import work; work()")


def cores() -> int:
    """Return how many processes are worth starting here."""
    return min(all_cores(), MAX_WORKERS)


def all_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Worker:
    """A process that judges.

    is_ready: whether it has found the targets. task: the number of what it is judging. compiles: whether it has judged
    any of `COMPILED`.
    """

    def __init__(self, answers: Answers) -> None:
        # A session of its own, which Ctrl-C does not reach: the command ends its processes.
        self.process = subprocess.Popen(COMMAND, stdin=PIPE, stdout=PIPE, start_new_session=True)
        self.is_ready = False
        self.task: int | None = None
        self.compiles = False
        self.listener = Thread(target=self._listen, args=(answers,), daemon=True)
        self.listener.start()
        self.send(sys.path)

    def send(self, message: object) -> None:
        """Send a message; if the process has died, the end of its output shows it."""
        assert self.process.stdin is not None
        with _ignoring_sigpipe(), suppress(OSError):
            pickle.dump(message, self.process.stdin)
            self.process.stdin.flush()

    def _listen(self, answers: Answers) -> None:
        """Put what the process says where the command reads it, and None at the end."""
        assert self.process.stdout is not None
        with suppress(Exception):  # the end, or what is no verdict
            while True:
                answers.put((self, pickle.load(self.process.stdout)))
        answers.put((self, None))

    def end(self, patience: float = 0.0) -> int | None:
        """End the process; return its exit status, None if it did not end by itself within `patience` seconds."""
        status = None
        with suppress(subprocess.TimeoutExpired):
            status = self.process.wait(patience)
        self.process.kill()
        self.listener.join(EXIT_TIMEOUT)
        with _ignoring_sigpipe(), suppress(OSError):
            self.process.__exit__(None, None, None)  # closes its pipes, and waits for it
        return status


class Workers:
    """Processes that judge, for as long as the block lasts; with one job, and where none can start, there are none.

    targets: what they judge. unread: verdicts that were reached, but not yielded before `judge_all` was closed.

    >>> with Workers(1) as workers:
    ...     workers.members
    []
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.members: list[Worker] = []
        self.targets: list[str] = []
        self.unread: list[Verdict] = []
        self.answers: Answers = SimpleQueue()

    def __enter__(self) -> Workers:
        """Start the processes."""
        for _ in range(self.jobs if self.jobs > 1 else 0):
            self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the processes, whatever they are doing."""
        for worker in self.members:
            worker.end()

    def find(self, targets: Iterable[str]) -> None:
        """Let the processes import all that is judged, in order, as the command has done."""
        self.targets = list(targets)
        for worker in self.members:
            worker.send(self.targets)

    def judge_all(self, resolved: Resolved, settings: Settings) -> Generator[Verdict]:
        """Yield the verdicts on one of the targets, in the order of the tasks."""
        from mha.conformance.engine.judge import judge

        if not self.targets:
            self.find([resolved.target])
        waiting = in_order_of_start(settings.tasks)
        found: dict[int, Verdict] = {}
        try:
            for number, task in enumerate(settings.tasks):
                while self.members and number not in found:
                    for worker in self.members:
                        if worker.is_ready and worker.task is None and (chosen := self.next_for(worker, waiting)):
                            waiting.remove(chosen)
                            worker.task, given = chosen
                            worker.send((resolved.target, given, settings))
                    found |= self._answer(resolved, settings)
                yield found.pop(number) if number in found else judge(resolved, *task, settings)
        finally:
            self.unread = list(found.values())

    def next_for(self, worker: Worker, waiting: list[tuple[int, Task]]) -> tuple[int, Task] | None:
        """Return the first task for a process: none of `COMPILED` where another one judges these."""
        taken = any(other.compiles for other in self.members if other is not worker)
        chosen = next((each for each in waiting if not (taken and each[1].clause in COMPILED)), None)
        worker.compiles |= chosen is not None and chosen[1].clause in COMPILED
        return chosen

    def _answer(self, resolved: Resolved, settings: Settings) -> dict[int, Verdict]:
        """Wait for what a process says; return the verdict by its number, if it is one."""
        worker, answer = self.answers.get()
        judged, worker.task = worker.task, None
        if answer is None:
            self.members.remove(worker)
            status = worker.end(EXIT_TIMEOUT)
            if judged is None:  # it did not find the targets, or died of what none of them did
                return {}
            self._start()
            answer = crashed(resolved, settings.tasks[judged], settings, status)
        worker.is_ready = True
        return {} if judged is None else {judged: answer}

    def _start(self) -> None:
        with suppress(OSError):  # as many as can start
            self.members.append(Worker(self.answers))
            if self.targets:
                self.members[-1].send(self.targets)


def in_order_of_start(tasks: Sequence[Task]) -> list[tuple[int, Task]]:
    """Return the tasks with their numbers: those of `COMPILED` soon, since the process that has them has more to do."""
    from mha.conformance.settings import FIRST

    numbered = list(enumerate(tasks))
    first, rest = numbered[: len(FIRST)], numbered[len(FIRST) :]
    return first + sorted(rest, key=lambda each: each[1].clause not in COMPILED)


def crashed(resolved: Resolved, task: Task, settings: Settings, status: int | None) -> Verdict:
    """Return the verdict on what a process was judging when it ended; status: its exit status."""
    from mha.conformance.engine.judge import stopped

    if status is None:
        return stopped(resolved, task, settings, "its process closed its output")
    if status >= 0:
        return stopped(resolved, task, settings, f"its process exited with status {status}")
    with suppress(ValueError):  # a number without a name
        name = signal.Signals(-status).name
        if name == "SIGKILL":  # not by itself: as where memory runs out
            return stopped(resolved, task, settings, "its process was killed; try --jobs 1", status="harness_error")
        return stopped(resolved, task, settings, f"its process was ended by {name}")
    return stopped(resolved, task, settings, f"its process was ended by signal {-status}")


@contextmanager
def _ignoring_sigpipe() -> Iterator[None]:
    """Let writing to a process that has died raise an error, instead of ending the command."""
    if not hasattr(signal, "SIGPIPE"):
        yield
        return
    previous = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGPIPE, previous)


def work() -> None:
    """Judge what comes through standard input until it ends."""
    given, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def say(answer: object) -> None:
        pickle.dump(answer, answers)
        answers.flush()

    tasks: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_read, args=(given, tasks), daemon=True).start()
    sys.path[:] = tasks.get()
    from mha.conformance.engine.judge import judge
    from mha.implementations import resolve

    with suppress(BrokenPipeError):
        try:
            known = {target: resolve(target)[0] for target in tasks.get()}
        except ValueError:
            return
        say("ready")
        gc.freeze()  # what is loaded stays, and is not searched for garbage again
        while True:
            target, task, settings = tasks.get()
            say(judge(known[target], task.clause, task.dtype, task.device, settings))


def _read(given: BinaryIO, tasks: SimpleQueue[Any]) -> None:
    """Queue what comes; at its end, as where the command was killed, end the process, whatever it waits for."""
    with suppress(Exception):  # the end, or what cannot be read
        while True:
            tasks.put(pickle.load(given))
    os._exit(0)
