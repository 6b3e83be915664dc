"""Processes that run the code of others: what they say is ours, what they start ends with them.

Such a process gets a task through standard input, with a token that its messages must carry, and
prints each message as a line of JSON. On Linux it is two: one that loads nothing of the user's, to
which all that is started there falls when its own parent ends, and its child, which does the work.
When the work ends, or whoever gave the task is gone, the first kills all the rest.
Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from subprocess import PIPE
from tempfile import TemporaryFile
from threading import Lock, Thread
from time import monotonic, sleep
from typing import IO, Any, NoReturn

from mha.conformance.engine.descendants import adopt_orphans, end_with_parent, kill_descendants
from mha.conformance.engine.watch import why

Process = subprocess.Popen[bytes]
# What the allocators of Python, C++ and torch say; the last on GPUs.
OUT_OF_MEMORY = re.compile("MemoryError|bad_alloc|can('t|not) allocate memory|out of memory", re.I)
# Why a process ended early where the limits, or the memory of the machine, may be to blame.
TIMEOUT, MEMORY, KILLED = "timeout", "memory", "killed"
GARBLED = "its process wrote to the pipe of its verdicts what is not one"
CLOSED = "its process closed its output"
# In bytes, of a message. In seconds: between looks at the clock, and for a process to end.
LONGEST, TICK, GRACE = 1 << 24, 0.5, 2.0


class Supervised:
    """A process that was started.

    seconds: until it is ended, or 0. stop: why that was too early.
    """

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self.errors: IO[bytes] = TemporaryFile()  # noqa: SIM115  closed by `end`
        # Jobs share the cores: threads of torch would only wait for one another.
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        pipes: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, start_new_session=True, env=environment, **pipes)
        self.token = secrets.token_hex(16)
        self.deadline = monotonic() + seconds if seconds else float("inf")
        self.stop = ""

    def messages(self, task: Mapping[str, object]) -> Iterator[Any]:
        """Send a task, and yield what the process says until it is done, or ends too early."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended, or was just cancelled
            self.process.stdin.write(json.dumps({"token": self.token, **task}).encode() + b"\n")
            self.process.stdin.flush()
        for line in self._lines():
            message = self._read(line)
            if message is None:
                self.stop = GARBLED
                return
            if message == "done":
                return
            yield message
        self.stop = self.stop or self._reason()

    def _read(self, line: bytes) -> Any:
        """Return a message, None if the line is not one of ours."""
        token, _, text = line.partition(b" ")
        if token != self.token.encode():
            return None
        with suppress(ValueError, RecursionError):
            return json.loads(text)
        return None

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines that the process prints, until it ends or its time is over."""
        assert self.process.stdout is not None
        pipe, waiting, text = self.process.stdout.fileno(), select.poll(), b""
        waiting.register(pipe, select.POLLIN)
        while True:
            if monotonic() >= self.deadline:
                self.stop = TIMEOUT
                return
            left = max(0.0, min(TICK, self.deadline - monotonic()))
            has_ended = self.process.poll() is not None
            if not waiting.poll(1000 * left if not has_ended else 0):
                if has_ended:  # and what it has left holds the pipe
                    return
                continue
            read = os.read(pipe, 1 << 16)
            text += read
            if not read or (len(text) > LONGEST and b"\n" not in text):
                self.stop = GARBLED if read else ""
                return
            *lines, text = text.split(b"\n")
            yield from lines

    def _reason(self) -> str:
        """Return why the process ended early; its last words say more where it exited by itself."""
        try:
            status = self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            return CLOSED
        if status == -signal.SIGKILL:
            return KILLED
        if status < 0:
            return why(status)
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - 2000))
        last = (self.errors.read().decode(errors="replace").strip() or " ").splitlines()[-1]
        if OUT_OF_MEMORY.search(last):
            return MEMORY
        return f"{why(status)}: {last:.300}".rstrip(": ")

    def allow(self, seconds: float) -> None:
        """End the process so many seconds from now."""
        self.deadline = monotonic() + seconds

    def end(self) -> None:
        """End the process, and all that it started."""
        end_all([self.process])
        if self.process.stdout:
            self.process.stdout.close()
        self.errors.close()


class Cancelled(Exception):
    """What a process does is not brought to its end, since the run is over."""


class Processes:
    """Those that run, until they are all ended."""

    def __init__(self) -> None:
        self.lock, self.running, self.closed = Lock(), list[Process](), False

    def add(self, process: Process) -> None:
        """Note a process that has started; raises Cancelled if it came too late."""
        with self.lock:
            self.running = [*(each for each in self.running if each.poll() is None), process]
            if self.closed:
                raise Cancelled

    def kill(self) -> None:
        """End all of them, and those that start from now on."""
        with self.lock:
            self.closed = True
            end_all(self.running)


def end_all(processes: Iterable[Process]) -> None:
    """End processes, and all that they started: each does so as its input ends, or is killed."""
    processes = list(processes)
    for process in processes:
        if process.stdin:
            with suppress(OSError, ValueError):
                process.stdin.close()
    deadline = monotonic() + GRACE
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - monotonic()))
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def serve(work: Callable[[dict[str, Any]], Iterator[object]]) -> None:
    """Be such a process: do the work of its task, and print what that yields."""
    tasks, output = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    task = json.loads(tasks.readline())
    if sys.platform == "linux":
        _become_the_child(tasks, output)
    else:
        Thread(target=_die_at_end, args=(tasks,), daemon=True).start()
    token, own = task.pop("token"), os.getpid()
    answers = os.fdopen(output, "w", encoding="utf-8")
    limit_memory(task["memory"])

    def say(message: object) -> None:
        if os.getpid() != own:  # a fork that the code has made, and left to go on
            os._exit(1)
        try:
            answers.write(f"{token} {json.dumps(message, ensure_ascii=True)}\n")
            answers.flush()
        except (OSError, ValueError):
            sys.exit(CLOSED)

    for message in work(task):
        say(message)
    say("done")


def limit_memory(gibibytes: float) -> None:
    """Limit what the process may allocate; what is only reserved, as by CUDA, does not count."""
    if gibibytes and sys.platform == "linux":
        import resource

        size = int(gibibytes * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def _die_at_end(tasks: IO[bytes]) -> None:
    """End the process, and all that it started, when whoever gave it its task is gone."""
    tasks.read()
    os.killpg(0, signal.SIGKILL)


def _become_the_child(tasks: IO[bytes], output: int) -> None:
    """Fork, and return in the child; the parent waits for the end of it, and kills what is left."""
    parent = os.getpid()
    adopt_orphans()
    worker = os.fork()
    if worker:
        os.close(output)
        Thread(target=_kill_at_end, args=(tasks, worker), daemon=True).start()
        _, status = os.waitpid(worker, 0)
        kill_descendants()
        _exit_as(os.waitstatus_to_exitcode(status))
    tasks.close()
    end_with_parent(parent)


def _kill_at_end(tasks: IO[bytes], worker: int) -> None:
    tasks.read()
    with suppress(OSError):
        os.kill(worker, signal.SIGKILL)


def _exit_as(status: int) -> NoReturn:
    """End as the child did."""
    if status < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
        sleep(GRACE)
    os._exit(status if status >= 0 else 1)
