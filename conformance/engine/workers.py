"""Judging in other processes, a clause at a time: one that crashes or hangs fails only its clause.

Code that is judged never runs in the process that decides. On Linux the others are forks of it,
made once torch and the judge are imported, so that they cost little; elsewhere, and where a GPU is
used, each is a Python of its own.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from multiprocessing.connection import wait
from time import monotonic
from typing import TYPE_CHECKING, Any

from mha.conformance.engine import guard
from mha.conformance.engine.ahead import Ahead
from mha.conformance.engine.found import Found, Request
from mha.conformance.engine.watch import Ended, GarbledError, why
from mha.conformance.project import CALL_TIMEOUT

if TYPE_CHECKING:
    from mha.conformance.engine.worker import Worker
    from mha.conformance.results import Verdict
    from mha.conformance.settings import Settings, Task
    from mha.implementations import Resolved

# More of them take more memory than they save time.
MAX_WORKERS = 8
# In seconds, between two looks at processes that say nothing.
LOOK = 0.1
# An implementation whose calls were ended for their time in so many clauses is not judged on.
MOST_HANGS = 3
# After so many processes in a row that could not import what is judged, no more are started.
MOST_FAILED_STARTS = 3
# Those that import the compiler go to one process, since that takes each of them a second.
COMPILED = ("CMP-1", "CMP-2", "CMP-3")
# Those that take longest: started last, they would leave the other processes idle.
LONGEST = ("NUM-1", "GRD-1", "STA-3")


def cores() -> int:
    """Return how many processes are worth starting here."""
    return min(all_cores(), MAX_WORKERS)


def all_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class TimeIsUp(Exception):
    """The run is over, because its time is."""


Message = dict[str, Any] | Ended


@dataclass
class _Queue:
    """What is judged of an implementation.

    waiting: the tasks that no process has, with their numbers.
    found: the verdicts by number, until they are yielded.
    hangs: in how many clauses a call did not return.
    """

    resolved: Resolved
    settings: Settings
    waiting: list[tuple[int, Task]]
    found: dict[int, Verdict] = field(default_factory=dict)
    hangs: int = 0


class Workers:
    """Processes that judge, for as long as the block lasts.

    Each imports all targets (`find`), then gets tasks (`_give`) and sends verdicts (`_take`). One
    that ends early, or sends what was not due, is replaced, and its task has a verdict on that.

    timeout: in seconds, of a call of what is judged, 0 for none.
    until: when the run is over, by the monotonic clock, 0 for never.
    heard: is given each verdict when it is reached.
    heard_at_once: is given a failure as soon as a case fails; the verdict may be another.
    between: is called between two looks at the processes; what it raises ends the run.
    declarations: by target, how it was understood before, for where it cannot be inferred again;
        None where nothing is judged again.
    ahead: judges while the others infer, as `declarations` say, for `heard_at_once`.
    files: those of the user's that were imported, with their places in packages, where it is.
    unread: verdicts that were reached, but not yielded before `judge_all` was closed.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = max(1, jobs)
        self.timeout, self.until = CALL_TIMEOUT, 0.0
        self.heard: Callable[[Verdict], object] = lambda _: None
        self.heard_at_once: Callable[[Verdict], object] = lambda _: None
        self.between: Callable[[], object] = lambda: None
        self.files = dict[str, str]()
        self.declarations: dict[str, str] | None = None
        self.ahead = Ahead()
        self.unread: list[Verdict] = []
        self.members: list[Worker] = []
        self._targets: tuple[str, ...] = ()
        self._messages: deque[tuple[Worker, Message]] = deque()
        self._forks, self._failed_starts = guard.may_fork(), 0

    def __enter__(self) -> Workers:
        """Start the processes."""
        if self._forks:
            _import_the_judge()
        self._start(self.jobs)
        return self

    def __exit__(self, *error: object) -> None:
        """End the processes, whatever they are doing."""
        self._end_all()

    def afresh(self) -> None:
        """Have processes that have imported nothing, and end the others, whatever they do."""
        if not self._targets and len(self.members) == self.jobs:
            return
        self._end_all()
        self._messages.clear()
        self._targets, self._failed_starts = (), 0
        self._start(self.jobs)
        if self.declarations and self._forks:
            self.ahead.start(self.members)

    def _end_all(self) -> None:
        self.ahead.end()
        while self.members:
            self.members.pop().end()

    def find(self, targets: Iterable[str]) -> Found:
        """Let the processes import all that is judged, in order; return what the first one found.

        Raises ValueError for a target that cannot be used, or that ends each process in which it is
        imported, and TimeIsUp.
        """
        self._targets = tuple(targets)
        for number, worker in enumerate(self.members):
            worker.send(Request(self._targets, self.declarations, is_heard=number == 0))
        self.ahead.begin(self._targets, self.declarations or {})
        try:
            return self._found()
        finally:
            self.ahead.end()

    def _found(self) -> Found:
        """Wait for what the first process finds; raises as `find` does."""
        while True:
            try:
                worker, message = self._next()
            except TimeIsUp:
                which = self.members[0].finding or self._targets[0]
                raise TimeIsUp(f"{which!r} was still being imported or tried out") from None
            if isinstance(message, Ended):
                self._failed_starts += 1
                if not self.members:
                    what = f"{worker.finding!r} cannot be judged"
                    raise ValueError(f"{what}: while it was imported or tried out, {message.why}")
            elif "error" in message:
                raise ValueError(str(message["error"]))
            elif "found" in message:
                worker.is_ready = True
                return Found.of(message)

    def judge_all(self, resolved: Resolved, settings: Settings) -> Generator[Verdict]:
        """Yield the verdicts on one of the targets, in the order of the tasks; raises TimeIsUp."""
        if not self._targets:
            self.find([resolved.target])
        # A fork of a process that has asked for CUDA cannot use it.
        self._forks &= "cuda" not in settings.devices
        waiting = list(enumerate(settings.tasks))
        if self.jobs > 1:
            waiting = in_order_of_start(settings.tasks)
        queue = _Queue(resolved, settings, waiting)
        try:
            for number in range(len(settings.tasks)):
                while number not in queue.found:
                    self._give(queue)
                    if number not in queue.found:
                        self._take(queue)
                yield queue.found.pop(number)
        finally:
            self.unread = list(queue.found.values())

    def next_for(self, worker: Worker, waiting: list[tuple[int, Task]]) -> tuple[int, Task] | None:
        """Return the first task for a process: none of `COMPILED` where another judges these."""
        another_compiles = any(each.compiles for each in self.members if each is not worker)
        for number, task in waiting:
            is_compiled = task.clause in COMPILED
            if not (is_compiled and another_compiles):
                worker.compiles |= is_compiled
                return number, task
        return None

    def _give(self, queue: _Queue) -> None:
        """Give a task to each idle process; where no more are given, note why for all that wait."""
        if refused := self._refused(queue):
            from mha.conformance.engine.judge import not_judged

            for number, task in queue.waiting:
                queue.found[number] = not_judged(queue.resolved, task, queue.settings, refused)
            queue.waiting.clear()
        for worker in self.members:
            if not worker.is_ready or worker.task is not None:
                continue
            if chosen := self.next_for(worker, queue.waiting):
                queue.waiting.remove(chosen)
                worker.task, task = chosen
                worker.judged.add(queue.resolved.target)
                worker.send((queue.resolved.target, task, queue.settings))

    def _refused(self, queue: _Queue) -> str:
        """Return why no more tasks are given, "" if they are."""
        if queue.hangs >= MOST_HANGS:
            return f"in {queue.hangs} clauses a call did not return within {self.timeout:g} s"
        if not self.members:
            return "it could be imported at first, but not again, by another process"
        return ""

    def _take(self, queue: _Queue) -> None:
        """Wait for a message, note a verdict in it, and replace the process if it has ended."""
        worker, message = self._next()
        number, worker.task = worker.task, None
        if number is None:
            if not isinstance(message, Ended) and not {"error", "found"} & set(message):
                message = self._garbled(worker)
        elif isinstance(message, Ended) and worker.judged != {queue.resolved.target}:
            # Another implementation may have left what ended the process, such as a thread.
            queue.waiting.insert(0, (number, queue.settings.tasks[number]))
            message = replace(message, is_late=False)
        else:
            message = self._note_verdict(worker, message, queue, number)
        if isinstance(message, Ended):
            queue.hangs += message.is_late
            self._replace(worker)
        elif message.get("lost"):  # the use of its GPU
            self._end(worker)
            self._replace(worker)
        elif "found" in message:
            worker.is_ready, self._failed_starts = True, 0

    def _note_verdict(
        self, worker: Worker, message: Message, queue: _Queue, number: int
    ) -> Message:
        """Note the verdict on a task; return the message, or the end of a process with another."""
        verdict = _verdict_in(message, queue, number)
        if verdict is None:  # from code that has found the channel
            message = self._garbled(worker)
            verdict = crashed(queue.resolved, queue.settings.tasks[number], queue.settings, message)
        queue.found[number] = verdict
        self.heard(verdict)
        return message

    def _garbled(self, worker: Worker) -> Ended:
        """End a process that has sent what was not due."""
        self._end(worker)
        return Ended("its process sent something else than the verdict")

    def _end(self, worker: Worker) -> None:
        """End a process, and forget what else it has said."""
        self.members.remove(worker)
        self._messages = deque(each for each in self._messages if each[0] is not worker)
        worker.end()

    def _replace(self, worker: Worker) -> None:
        """Start another process in the place of one that has ended, unless too many failed to."""
        self._failed_starts += not worker.is_ready
        if self._failed_starts < MOST_FAILED_STARTS:
            self._start()

    def _next(self) -> tuple[Worker, Message]:
        """Wait for what a process says, or for its end; raises TimeIsUp."""
        while not self._messages:
            if self.until and monotonic() > self.until:
                raise TimeIsUp
            self._look()
        return self._messages.popleft()

    def _look(self) -> None:
        """Queue what the processes have said, and end those whose time is up."""
        self.between()
        wait([*(worker.channel for worker in self.members), *self.ahead.channels], LOOK)
        self.ahead.hear(self.heard_at_once)
        for worker in [*self.members]:
            has_ended = worker.has_ended  # asked before what it has said last is read
            try:
                said = worker.received()
            except GarbledError:
                ended = self._garbled(worker)
                self._messages.append((worker, ended))
                continue
            self._note_said(worker, said or [])
            if said is None or (has_ended and worker.is_silent):
                self.members.remove(worker)
                status, place = worker.end(patient=True)
                self._messages.append((worker, Ended(why(status) + place, status)))
            elif not said and (late := worker.overdue(self.timeout)):
                self.members.remove(worker)
                self._messages.append((worker, late))
                worker.end()

    def _note_said(self, worker: Worker, messages: Iterable[dict[str, Any]]) -> None:
        """Queue messages, and note what the process is importing, has imported, and sees fail."""
        from mha.conformance.results import read_verdict

        for message in messages:
            if "finding" in message:
                worker.finding = str(message["finding"])
            elif "failing" in message:
                with suppress(ValueError):  # of code that has found the channel
                    self.heard_at_once(read_verdict(message["failing"]))
            elif "files" in message:
                self.files |= {str(file): str(place) for file, place in message["files"].items()}
            else:
                self._messages.append((worker, message))

    def _start(self, count: int = 1) -> None:
        """Start so many processes; raises ValueError where none can start."""
        from mha.conformance.engine.worker import Worker

        new = list[Worker]()
        try:
            for _ in range(count):
                beside = [*self.members, *new]
                new.append(Worker.forked(beside) if self._forks else Worker.started())
        except OSError as error:
            if not (self.members or new):
                why_not = f"no process can be started to judge in: {error.strerror}"
                raise ValueError(why_not) from None
        self.members += new
        for worker in new:
            if self._targets:
                worker.send(Request(self._targets, self.declarations))


def _verdict_in(message: Message, queue: _Queue, number: int) -> Verdict | None:
    """Return the verdict on a task in a message, or on the end of its process, if there is one."""
    from mha.conformance.results import read_verdict

    if isinstance(message, Ended):
        return crashed(queue.resolved, queue.settings.tasks[number], queue.settings, message)
    with suppress(ValueError):
        verdict = read_verdict(message.get("verdict"))
        about = verdict.implementation, verdict.clause, verdict.dtype, verdict.device
        if about == (queue.resolved.implementation.name, *queue.settings.tasks[number]):
            return verdict
    return None


def _import_the_judge() -> None:
    """Import torch and all that judges, so that forked processes need not."""
    gc.disable()  # imports leave little garbage, and looking for it takes a tenth of their time
    try:
        import mha.conformance.engine.child
        import mha.conformance.engine.judge
        import mha.conformance.engine.subjects  # noqa: F401  so that they are loaded
        from mha.conformance.properties.registry import properties

        properties()
        gc.freeze()  # what is loaded stays, and is not searched for garbage again
    finally:
        gc.enable()


def in_order_of_start(tasks: Sequence[Task]) -> list[tuple[int, Task]]:
    """Return the tasks with their numbers: after `FIRST`, those that take a process longest."""
    from mha.conformance.settings import FIRST

    soon = (*COMPILED, *LONGEST)

    def place(each: tuple[int, Task]) -> int:
        clause = each[1].clause
        return soon.index(clause) if clause in soon else len(soon)

    numbered = list(enumerate(tasks))
    first = [*takewhile(lambda each: each[1].clause in FIRST, numbered)]
    return first + sorted(numbered[len(first) :], key=place)


def crashed(resolved: Resolved, task: Task, settings: Settings, ended: Ended) -> Verdict:
    """Return the verdict on what a process was judging when it ended."""
    from mha.conformance.engine.judge import stopped

    # Killed by another process, as where memory runs out.
    is_ours = ended.is_ours or ended.status == -signal.SIGKILL
    return stopped(
        resolved, task, settings, ended.why, status="harness_error" if is_ours else "fail"
    )
