"""One process that judges, as seen by the process that decides: it is asked, watched, ended."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import get_context
from subprocess import Popen
from tempfile import TemporaryFile
from time import monotonic, sleep
from typing import IO, TYPE_CHECKING, Any

from mha.conformance.engine import child
from mha.conformance.engine.watch import TIMES_SIZE, Ended, GarbledError, Times, place_in

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

# Of a process of its own, with the numbers of its descriptors.
COMMAND = "from mha.conformance.engine.child import work_by_itself; work_by_itself{}"
# In seconds: for a process whose output has ended, and for one that was asked to say where it is.
EXIT_TIMEOUT, LAST_WORDS_TIMEOUT = 2.0, 1.0
# In bytes; no verdict is nearly as long.
LONGEST_MESSAGE = 1 << 26
# A write to a process that has ended is an error, and no signal, which would end the command; for
# macOS, from sys/socket.h.
NO_SIGNAL, SO_NOSIGPIPE = getattr(socket, "MSG_NOSIGNAL", 0), 0x1022


class Worker:
    """A process that judges.

    is_ready: whether it has found the targets.
    task: the number of what it is judging.
    compiles: whether it has judged any of `COMPILED`.
    finding: the target that it is importing.
    judged: the targets that it was given tasks of.
    is_silent: whether nothing was left to read at the last look.
    token: what each of its messages begins with.
    """

    def __init__(self, process: Popen[bytes] | ForkProcess, ends: _Ends) -> None:
        self.process, self.channel = process, ends.own
        self.times, self.last_words = ends.times, ends.last_words
        self.is_ready = False
        self.task: int | None = None
        self.compiles = False
        self.finding = ""
        self.judged: set[str] = set()
        self.unread, self.is_silent = b"", False
        self.token = secrets.token_hex(8)
        if sys.platform == "darwin":
            self.channel.setsockopt(socket.SOL_SOCKET, SO_NOSIGPIPE, 1)
        self.channel.setblocking(False)
        self.send((self.token, sys.path))

    @classmethod
    def started(cls) -> Worker:
        """Start a Python of its own, in a session that Ctrl-C does not reach.

        The command ends its processes.
        """
        with _Ends() as ends:
            given = ends.given.fileno(), ends.shared.fileno(), ends.last_words.fileno()
            command = [sys.executable, "-P", "-c", COMMAND.format(given)]
            return cls(Popen(command, pass_fds=given, start_new_session=True), ends)

    @classmethod
    def forked(cls, beside: Sequence[Worker]) -> Worker:
        """Fork this process; beside: the others, whose channels it does not keep open."""
        with _Ends() as ends, warnings.catch_warnings():
            # Of threads, such as that of a progress bar.
            warnings.simplefilter("ignore", DeprecationWarning)
            foreign = [ends.own, *(other.channel for other in beside)]
            arguments = ends.given, ends.times, ends.last_words, foreign
            process = get_context("fork").Process(target=_work_in_a_fork, args=arguments)
            process.start()
            return cls(process, ends)

    def send(self, message: object) -> None:
        """Send a message; if the process has died, the end of its output shows it."""
        self.times.restart()
        self.channel.setblocking(True)
        with suppress(OSError):
            self.channel.sendall(pickle.dumps(message), NO_SIGNAL)
        self.channel.setblocking(False)

    def received(self) -> list[dict[str, Any]] | None:
        """Return what was said since the last look, None at the end; raises GarbledError."""
        self.is_silent = False
        try:
            data = self.channel.recv(1 << 20)
        except BlockingIOError:
            self.is_silent = True
            return []
        except OSError:
            return None
        *lines, self.unread = (self.unread + data).split(b"\n")
        if len(self.unread) > LONGEST_MESSAGE:
            raise GarbledError
        return [self._message(line) for line in lines] if data else None

    def _message(self, line: bytes) -> dict[str, Any]:
        token, _, text = line.partition(b" ")
        with suppress(ValueError, RecursionError):
            message = json.loads(text)
            if token == self.token.encode() and isinstance(message, dict):
                return message
        raise GarbledError

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; another one may hold its channel open."""
        return self._status is not None

    def overdue(self, limit: float) -> Ended | None:
        """Return why the process has to be ended, None if it has not.

        limit: in seconds, of a call, 0 for none.
        """
        is_idle = self.is_ready and self.task is None
        if not limit or is_idle:
            return None
        if late := self.times.overdue(limit):
            return Ended(late + self._place(), is_late=True)
        idle = self.times.idle(limit)
        return Ended(idle + self._place(), is_ours=True) if idle else None

    def _place(self) -> str:
        """Ask the process to crash, and return where it was, in words."""
        with suppress(OSError):
            os.kill(self.pid, signal.SIGABRT)
        self._wait(LAST_WORDS_TIMEOUT)
        return place_in(self.last_words)

    @property
    def pid(self) -> int:
        """The number of the process."""
        assert self.process.pid is not None
        return self.process.pid

    def end(self, *, patient: bool = False) -> tuple[int | None, str]:
        """End the process and its session; return its exit status, and where it crashed, in words.

        The status is None if it did not end by itself.

        patient: whether to wait for that for a while.
        """
        status = self._wait(EXIT_TIMEOUT if patient else 0.0)
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()
        self._wait(EXIT_TIMEOUT)
        place = place_in(self.last_words)
        for each in (self.channel, self.last_words, self.times):
            each.close()
        return status, place

    def _wait(self, patience: float) -> int | None:
        """Return the exit status, None if the process does not end within so many seconds."""
        end = monotonic() + patience
        while (status := self._status) is None and monotonic() < end:
            sleep(0.01)
        return status

    @property
    def _status(self) -> int | None:
        """The exit status, None as long as the process runs."""
        # Not `join`, which waits for all that a fork has left behind.
        return self.process.poll() if isinstance(self.process, Popen) else self.process.exitcode


class _Ends:
    """What a process and the one that starts it share; in the block, also what the new one gets.

    own, given: the ends of the channel.
    times: of its calls.
    last_words: its traceback in a crash.
    """

    def __init__(self) -> None:
        self.own, self.given = socket.socketpair()
        self.shared = TemporaryFile()  # noqa: SIM115  it is closed with the block
        self.shared.truncate(TIMES_SIZE)
        self.times = Times(self.shared)
        self.last_words: IO[bytes] = TemporaryFile(buffering=0)  # noqa: SIM115  `Worker.end` closes it

    def __enter__(self) -> _Ends:
        return self

    def __exit__(self, *error: object) -> None:
        """Close what only the new process needs."""
        self.given.close()
        self.shared.close()


def _work_in_a_fork(
    channel: socket.socket, times: Times, last_words: IO[bytes], foreign: Sequence[socket.socket]
) -> None:
    """Do what `child.work` does in a fork of the command; foreign: channels of others."""
    os.setsid()
    for other in foreign:
        other.close()
    child.work(channel, times.shared, last_words)
