"""A command in a fork of its process: code that is judged there cannot end it without a word.

Nothing here imports torch.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from time import monotonic, sleep
from types import FrameType
from typing import IO

from mha.conformance.engine.watch import Times, place_in, why

# In seconds: between two looks, and for a process that has given its status, or was asked to say where it is.
LOOK, EXIT_TIMEOUT, LAST_WORDS_TIMEOUT = 0.25, 5.0, 1.0


# What a fork shares with the process that waits for it, as long as it lives.
KEPT: list[object] = []


@dataclass(frozen=True)
class Outcome:
    """How a command ended. status: of the exit, None if it gave none. why: in words, where it gave none."""

    status: int | None
    why: str = ""


def may_fork() -> bool:
    """Return whether processes may be forked: code that has run on torch, or CUDA, may hold a lock that a fork keeps.

    So only if torch is not imported yet: importing it starts no threads but OpenBLAS's, which it ends for a fork. Not
    on macOS, whose system libraries do not survive one.
    """
    return sys.platform == "linux" and "torch" not in sys.modules


def run_guarded(run: Callable[[], int], *, timeout: float = 0.0) -> Outcome:
    """Run a command in a fork, and return how it ended; where no process may be forked, run it in this one.

    timeout: in seconds, of a call of what is judged, 0 for none. Signals that interrupt the command reach it.
    """
    if not may_fork():
        return Outcome(run())
    parted = part(timeout)
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


def part(timeout: float) -> Outcome | Callable[[int], None]:
    """Fork this process: return, in the fork, what takes its status at the end, and in the other how it ended."""
    times, last_words = Times(), TemporaryFile(buffering=0)  # noqa: SIM115  it is closed, or kept in the fork
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    child = os.fork()
    if child:
        os.close(writing)
        with _Forwarding(child), closing(times), last_words:
            return _watched(child, reading, times, last_words, timeout)
    os.close(reading)
    KEPT.extend((times, last_words))
    faulthandler.enable(last_words, all_threads=False)
    from mha.implementations.clock import CLOCK

    CLOCK.share(times.shared)
    own = os.getpid()

    def finish(status: int) -> None:
        if os.getpid() == own:  # and no fork that code which is judged has made
            os.write(writing, bytes([status & 0xFF]))

    return finish


def _watched(child: int, reading: int, times: Times, last_words: IO[bytes], timeout: float) -> Outcome:
    """Return how the command in a child ended, once it has."""
    times.restart()
    with os.fdopen(reading, "rb", buffering=0) as given:
        while not select.select([given], [], [], LOOK)[0]:
            late = times.overdue(timeout) if timeout else ""
            if late:
                with suppress(OSError):
                    os.kill(child, signal.SIGABRT)
                _reaped(child, LAST_WORDS_TIMEOUT)
                return Outcome(None, late + place_in(last_words))
            if (status := _reaped(child, 0.0)) is not None:  # what it has started may keep the pipe open
                return Outcome(None, why(status) + place_in(last_words))
        code = given.read(1)
    status = _reaped(child, EXIT_TIMEOUT)
    return Outcome(code[0]) if code else Outcome(None, why(status) + place_in(last_words))


def _reaped(child: int, patience: float) -> int | None:
    """Return the exit status of a child, None if it does not end within so many seconds; then it is killed.

    With no patience at all, it is not.
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
    """Lets signals that interrupt a command reach it in its fork, where they are heeded; one from a terminal does."""

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
