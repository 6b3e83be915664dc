"""Judging in several processes: each judges a clause at a time, and fails only that clause if it crashes.

Where it is safe, the processes are forked once the command has imported torch and the judge, and before it imports what
is judged; elsewhere each starts a Python of its own, as one does that replaces a process that died. What an
implementation prints goes to standard error.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from multiprocessing import get_context
from queue import SimpleQueue
from subprocess import PIPE, Popen, TimeoutExpired
from threading import Thread
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

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
# Those that take longest: started last, they would leave the other processes idle.
LONGEST = ("NUM-1", "GRD-1", "STA-3")
COMMAND = (sys.executable, "-P", "-c", "from mha.conformance.engine.workers import work; work()")


def cores() -> int:
    """Return how many processes are worth starting here."""
    return min(all_cores(), MAX_WORKERS)


def all_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Worker:
    """A process that judges.

    input, output: its pipes. is_ready: whether it has found the targets. task: the number of what it is judging.
    compiles: whether it has judged any of `COMPILED`.
    """

    def __init__(self, process: Popen[bytes] | ForkProcess, tasks: IO[bytes], verdicts: IO[bytes]) -> None:
        self.process, self.input, self.output = process, tasks, verdicts
        self.is_ready = False
        self.task: int | None = None
        self.compiles = False
        self.listener: Thread | None = None

    @classmethod
    def started(cls) -> Worker:
        """Start a Python of its own, in a session that Ctrl-C does not reach: the command ends its processes."""
        process = Popen(COMMAND, stdin=PIPE, stdout=PIPE, start_new_session=True)
        assert process.stdin is not None
        assert process.stdout is not None
        return cls(process, process.stdin, process.stdout)

    @classmethod
    def forked(cls, beside: Sequence[Worker]) -> Worker:
        """Fork this process; beside: those that were forked before."""
        (its_tasks, tasks), (verdicts, its_verdicts) = (_pipe() for _ in range(2))
        # A process with the ends of another one would keep it from noticing that the command has ended.
        foreign = [tasks, verdicts, *(end for other in beside for end in (other.input, other.output))]
        process = get_context("fork").Process(target=_work_apart, args=(its_tasks, its_verdicts, foreign))
        process.start()
        its_tasks.close()
        its_verdicts.close()
        return cls(process, tasks, verdicts)

    def listen(self, answers: Answers) -> None:
        """Put what the process says, from now on, where the command reads it."""
        self.listener = Thread(target=self._listen, args=(answers,), daemon=True)
        self.listener.start()

    def send(self, message: object) -> None:
        """Send a message; if the process has died, the end of its output shows it."""
        with _ignoring_sigpipe(), suppress(OSError):
            pickle.dump(message, self.input)
            self.input.flush()

    def _listen(self, answers: Answers) -> None:
        """Put what the process says where the command reads it, and None at the end."""
        with suppress(Exception):  # the end, or what is no verdict
            while True:
                answers.put((self, pickle.load(self.output)))
        answers.put((self, None))

    def end(self, patience: float = 0.0) -> int | None:
        """End the process; return its exit status, None if it did not end by itself within `patience` seconds."""
        status = self._wait(patience)
        self.process.kill()
        if self.listener:
            self.listener.join(EXIT_TIMEOUT)
        for pipe in (self.input, self.output):
            with _ignoring_sigpipe(), suppress(OSError):
                pipe.close()
        self._wait(None)
        return status

    def _wait(self, patience: float | None) -> int | None:
        if not isinstance(self.process, Popen):
            self.process.join(patience)
            return self.process.exitcode
        with suppress(TimeoutExpired):
            return self.process.wait(patience)
        return None


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    """Return both ends of a pipe: what is written to the second one is read from the first."""
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb"), os.fdopen(writing, "wb")


@dataclass(frozen=True)
class FinalVerdict:
    """The verdict of a process that ends, since it can no longer use its GPU."""

    verdict: Verdict


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
        if self.jobs > 1:
            self._start(self.jobs, fork=may_fork())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the processes, whatever they are doing."""
        for worker in self.members:
            worker.end()

    def find(self, targets: Iterable[str]) -> None:
        """Let the processes import all that is judged, in order, as the command does meanwhile."""
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
        if worker not in self.members:  # the end of one that gave a final verdict
            return {}
        if answer is None or isinstance(answer, FinalVerdict):
            self.members.remove(worker)
            status = worker.end(EXIT_TIMEOUT)
            if judged is None:  # it did not find the targets, or died of what none of them did
                return {}
            self._start()
            answer = answer.verdict if answer else crashed(resolved, settings.tasks[judged], settings, status)
        worker.is_ready = True
        return {} if judged is None else {judged: answer}

    def _start(self, count: int = 1, *, fork: bool = False) -> None:
        """Start as many processes as can start."""
        if fork:
            _import_the_judge()
        new = list[Worker]()
        with suppress(OSError):
            for _ in range(count):
                new.append(Worker.forked(new) if fork else Worker.started())
        self.members += new
        for worker in new:  # threads, only once all are forked
            worker.listen(self.answers)
            worker.send(sys.path)
            if self.targets:
                worker.send(self.targets)


def may_fork() -> bool:
    """Return whether processes may be forked: code that has run on torch, or CUDA, may hold a lock that a fork keeps.

    So only before torch is imported: that starts no threads but OpenBLAS's, which it ends for a fork. Not on macOS,
    whose system libraries do not survive one.
    """
    return sys.platform == "linux" and "torch" not in sys.modules


def _import_the_judge() -> None:
    """Import torch and all that judges, so that forked processes need not."""
    gc.disable()  # imports leave little garbage, and looking for it takes a tenth of their time
    try:
        import mha.conformance.engine.judge  # noqa: F401  so that it is loaded
        from mha.conformance.properties.registry import properties

        properties()
        gc.freeze()  # what is loaded stays, and is not searched for garbage again
    finally:
        gc.enable()


def in_order_of_start(tasks: Sequence[Task]) -> list[tuple[int, Task]]:
    """Return the tasks with their numbers: those of `COMPILED` soon, since the process that has them has more to do."""
    from mha.conformance.settings import FIRST

    numbered = list(enumerate(tasks))
    soon = (*COMPILED, *LONGEST)
    first = [*takewhile(lambda each: each[1].clause in FIRST, numbered)]
    rest = numbered[len(first) :]
    return first + sorted(rest, key=lambda each: soon.index(each[1].clause) if each[1].clause in soon else len(soon))


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
    _judge_what_comes(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))


def _work_apart(given: IO[bytes], verdicts: IO[bytes], foreign: Iterable[IO[bytes]]) -> None:
    """Do what `work` does in a fork of the command; foreign: pipes of others."""
    os.setsid()
    # As a Python of its own has them, whatever the command has.
    for number, action in (
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGPIPE, signal.SIG_IGN),
    ):
        signal.signal(number, action)
    for pipe in foreign:
        pipe.close()
    _judge_what_comes(given, verdicts)


def _judge_what_comes(given: IO[bytes], verdicts: IO[bytes]) -> None:
    """Judge what comes until it ends."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what is judged may read, but not from the user
    os.dup2(2, 1)

    def say(answer: object) -> None:
        pickle.dump(answer, verdicts)
        verdicts.flush()

    tasks: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_read, args=(given, tasks), daemon=True).start()
    sys.path[:] = tasks.get()
    from mha.conformance.engine.judge import judge
    from mha.conformance.harness.isolation import gpu_is_lost
    from mha.implementations import resolve

    with suppress(BrokenPipeError):
        try:
            known = {each.target: each for target in tasks.get() for each in resolve(target)}
        except BaseException:  # the command meets it too, and reports it
            return
        say("ready")
        gc.freeze()  # what is loaded stays, and is not searched for garbage again
        while True:
            target, task, settings = tasks.get()
            verdict = judge(known[target], task.clause, task.dtype, task.device, settings)
            if gpu_is_lost():
                say(FinalVerdict(verdict))
                return
            say(verdict)


def _read(given: IO[bytes], tasks: SimpleQueue[Any]) -> None:
    """Queue what comes; at its end, as where the command was killed, end the process, whatever it waits for."""
    with suppress(Exception):  # the end, or what cannot be read
        while True:
            tasks.put(pickle.load(given))
    os._exit(0)
