"""Judging in several processes: each judges a clause at a time, and fails only that clause if it dies.

This module imports no torch: the processes start, and import it, while the command does.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mha.conformance.results import Verdict, stopped

if TYPE_CHECKING:
    from mha.conformance.settings import Settings
    from mha.implementations import Resolved

# More of them take more memory than they save time.
MOST = 8
# In seconds, for a process that is told to end.
PATIENCE = 2.0


def cores() -> int:
    """Return how many processes are worth starting here."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, MOST)


class Worker:
    """A process that judges. is_ready: whether it has started. task: the number of what it judges, None if nothing."""

    def __init__(self, context: Any) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.is_ready = False
        self.task: int | None = None

    def give(self, number: int, task: tuple[Any, ...]) -> None:
        """Give an idle process something to judge."""
        self.task = number
        with suppress(OSError):  # of one that has died, which shows when its answer is read
            self.connection.send(task)

    def end(self) -> str:
        """Wait for a process that has ended, or end it, and return how it ended."""
        self.process.join(PATIENCE)
        self.process.kill()
        code = self.process.exitcode or 0
        return f"its process was killed by {signal.Signals(-code).name}" if code < 0 else f"its process exited ({code})"


class Workers:
    """Processes that judge, for as long as the block lasts; for one job, there are none.

    >>> with Workers(1) as workers:
    ...     workers.members
    []
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.members: list[Worker] = []
        # A process that has imported torch, and no code of users, is forked for each; elsewhere, each imports it.
        self.context: Any = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
        if hasattr(self.context, "set_forkserver_preload"):
            self.context.set_forkserver_preload(["mha.conformance.engine.judge"])

    def __enter__(self) -> Workers:
        """Start the processes."""
        self.members = [Worker(self.context) for _ in range(self.jobs)] if self.jobs > 1 else []
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the processes, whatever they are doing."""
        for worker in self.members:
            worker.process.terminate()
        for worker in self.members:
            worker.end()

    def judge_all(self, resolved: Resolved, settings: Settings) -> Iterator[Verdict]:
        """Yield the verdicts on an implementation, in the order in which one process reaches them."""
        from mha.conformance.engine.judge import judge

        tasks = list(product(settings.devices, settings.dtypes, settings.judged_clauses))
        waiting, found = deque(range(len(tasks))), dict[int, Verdict | None]()
        for number, (device, dtype, clause) in enumerate(tasks):
            while self.members and number not in found:
                for worker in self.members:
                    if worker.is_ready and worker.task is None and waiting:
                        task = waiting.popleft()
                        worker.give(task, (resolved.target, settings, *tasks[task]))
                found |= self._answers(resolved.implementation.name, tasks)
            # Without processes, or for what they cannot find.
            yield found.pop(number, None) or judge(resolved, clause, dtype, device, settings)

    def _answers(self, name: str, tasks: Sequence[tuple[str, str, str]]) -> dict[int, Verdict | None]:
        """Wait for a process; return what was judged since, None for what was not found, by the number of the task."""
        found: dict[int, Verdict | None] = {}
        readable = wait([worker.connection for worker in self.members])
        for worker in [worker for worker in self.members if worker.connection in readable]:
            try:
                answer = worker.connection.recv()
            except (EOFError, OSError):
                self.members.remove(worker)
                if worker.task is not None:  # it is the implementation that has ended it
                    device, dtype, clause = tasks[worker.task]
                    found[worker.task] = stopped(name, clause, dtype, device, worker.end())
                    self.members.append(Worker(self.context))
                continue
            if worker.task is not None:
                found[worker.task] = answer
            worker.is_ready, worker.task = True, None
        return found


def _work(connection: Connection) -> None:
    """Judge what comes through the connection until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which then ends this process
    from mha.conformance.engine.judge import judge
    from mha.implementations import ImplementationError, resolve

    known: dict[str, Resolved | None] = {}
    connection.send("ready")
    while True:
        try:
            target, settings, device, dtype, clause = connection.recv()
        except EOFError:
            return
        if target not in known:
            try:
                (known[target],) = resolve(target)
            except (ImplementationError, ValueError):
                known[target] = None
        resolved = known[target]
        connection.send(resolved and judge(resolved, clause, dtype, device, settings))
