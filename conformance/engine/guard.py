"""A command in a fork of its process: code that is judged there cannot end it without a word.

Nothing here imports torch.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import secrets
import select
import signal
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from time import monotonic, sleep
from types import FrameType
from typing import IO, NoReturn

from mha.conformance.engine.descendants import end_with_parent
from mha.conformance.engine.watch import Times, place_in, why

# In seconds: between two looks; for a process that has given its status, or closed the pipe for it;
# and for one that was asked to say where it is.
LOOK, EXIT_TIMEOUT, CLOSED_TIMEOUT, LAST_WORDS_TIMEOUT = 0.25, 60.0, 5.0, 1.0
# In bytes, of what begins a status, so that nothing else is taken for one.
TOKEN = 16
# In the place of a status: Python comes to its end by itself, and so the exit status is the
# command's.
BY_ITSELF = 0xFF
GARBLED = "its process wrote to the pipe of its exit status what is not one"

# What a fork shares with the process that waits for it, as long as it lives.
KEPT: list[object] = []


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    status: of the exit, None if it gave none.
    why: in words, where it gave none.
    """

    status: int | None
    why: str = ""


def may_fork() -> bool:
    """Return whether processes may be forked.

    Code that has run on torch, or CUDA, may hold a lock that a fork keeps. So only if torch is not
    imported yet: importing it starts no threads but OpenBLAS's, which it ends for a fork. Not on
    macOS, whose system libraries do not survive one.
    """
    return sys.platform == "linux" and "torch" not in sys.modules


def run_guarded(run: Callable[[], int], *, timeout: float = 0.0) -> Outcome:
    """Run a command in a fork, and return how it ended; where none may be forked, run it here.

    SIGTERM reaches the fork, and so does Ctrl-C.

    timeout: in seconds, of a call of what is judged, 0 for none.
    """
    if not may_fork():
        return Outcome(run())
    parted = fork_off(timeout)
    if isinstance(parted, Outcome):
        return parted
    leave, status = os._exit, run()
    parted(status)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # it may be closed
            stream.flush()
    leave(status)
    raise AssertionError


def fork_off(timeout: float) -> Outcome | Callable[[int], None]:
    """Fork this process: return what takes the status of the fork, or in the other how it ended."""
    times, last_words = Times(), TemporaryFile(buffering=0)  # noqa: SIM115  it is closed, or kept in the fork
    reading, writing = os.pipe()
    token, parent = secrets.token_bytes(TOKEN), os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    child = os.fork()
    if child:
        os.close(writing)
        times.restart()
        given = os.fdopen(reading, "rb", buffering=0)
        with _Forwarding(child), closing(times), last_words, given:
            return _Fork(child, given, token, times, last_words).outcome(timeout)
    os.close(reading)
    end_with_parent(parent)
    KEPT.extend((times, last_words))
    faulthandler.enable(last_words, all_threads=False)
    _share(times)
    own = os.getpid()

    def finish(status: int) -> None:
        if os.getpid() == own:  # and no fork that code which is judged has made
            os.write(writing, token + bytes([status & 0xFF]))

    atexit.register(finish, BY_ITSELF)

    return finish


def watch_from_outside(timeout: float) -> None:
    """Let a fork end this process where a call does not return; Linux only.

    It is for a process that another one has started, and waits for. The fork runs nothing of torch,
    which may be imported already. timeout: in seconds, of a call.
    """
    times, parent = Times(), os.getpid()
    times.restart()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if os.fork() == 0:
        _end_when_overdue(times, parent, timeout)
    KEPT.append(times)
    _share(times)


def _end_when_overdue(times: Times, parent: int, timeout: float) -> NoReturn:
    """Kill the parent once a call takes too long, and say so; end then, or after the parent."""
    try:
        end_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # What is left open here would never seem closed to those who read it.
        error_stream = sys.__stderr__.fileno() if sys.__stderr__ else 2
        os.closerange(0, error_stream)
        os.closerange(error_stream + 1, os.sysconf("SC_OPEN_MAX"))
        while os.getppid() == parent:
            sleep(LOOK)
            if late := times.overdue(timeout):
                os.write(error_stream, f"\nmha: {late}\n".encode())
                os.kill(parent, signal.SIGKILL)
    finally:
        os._exit(0)


def _share(times: Times) -> None:
    """Let the clock of this process write where another one reads."""
    from mha.implementations.process.clock import CLOCK

    CLOCK.share(times.shared)


@dataclass
class _Fork:
    """A fork, as its parent knows it.

    given: where it writes its status, after the token.
    times, last_words: shared with it.
    """

    process: int
    given: IO[bytes]
    token: bytes
    times: Times
    last_words: IO[bytes]

    def outcome(self, timeout: float) -> Outcome:
        """Return how the command in the fork ended, once it has.

        timeout: in seconds, of a call, 0 for none.
        """
        status = None
        # It is reaped before the last look: what it has started may keep the pipe open, and it may
        # just have written.
        while not _is_readable(self.given, LOOK) and status is None:
            if timeout and (late := self.times.overdue(timeout)):
                return Outcome(None, late + self._place())
            status = _reaped(self.process, 0.0)
        said = self.given.read(TOKEN + 1) if _is_readable(self.given, 0.0) else b""
        is_status = len(said) == TOKEN + 1 and said.startswith(self.token)
        if status is None:
            status = _reaped(self.process, EXIT_TIMEOUT if is_status else CLOSED_TIMEOUT)
        if is_status:
            return Outcome(status if said[-1] == BY_ITSELF else said[-1])
        return Outcome(None, GARBLED if said else why(status) + place_in(self.last_words))

    def _place(self) -> str:
        """Ask the fork to crash, and return where it was, in words."""
        with suppress(OSError):
            os.kill(self.process, signal.SIGABRT)
        _reaped(self.process, LAST_WORDS_TIMEOUT)
        return place_in(self.last_words)


def _is_readable(given: IO[bytes], patience: float) -> bool:
    return bool(select.select([given], [], [], patience)[0])


def _reaped(child: int, patience: float) -> int | None:
    """Return the exit status of a child; kill it, and return None, if it does not end in time.

    patience: in seconds; with none at all, it is not killed.
    """
    end = monotonic() + patience
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if monotonic() > end:
            break
        sleep(0.01)
    if patience:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return None


class _Forwarding:
    """Lets SIGTERM reach a command in its fork; Ctrl-C at a terminal reaches both."""

    def __init__(self, child: int) -> None:
        self.child = child
        self.before: dict[int, object] = {}

    def __enter__(self) -> None:
        self.before = {
            signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._forward),
        }

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # it is what `signal` returned

    def _forward(self, number: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            os.kill(self.child, number)
