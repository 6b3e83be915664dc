"""Code of others while it is loaded: it neither ends the process nor hangs without a word."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer, current_thread, main_thread
from types import FrameType
from typing import NoReturn

from mha.implementations.errors import ImplementationError

# In seconds: after the first, what still loads is named on standard error; after the second, it
# counts as broken.
SLOW, PATIENCE = 20.0, 300.0


@contextmanager
def contained(what: str) -> Iterator[None]:
    """Let the block load code of others; what: that code, as users know it.

    Its `os._exit` raises SystemExit. A KeyboardInterrupt that nobody has caused is an
    ImplementationError, and so is a block that takes too long, in the main thread.
    """
    with _exit_refused(), _said_if_slow(what), _own_interrupts_only():
        yield


@contextmanager
def _exit_refused() -> Iterator[None]:
    leave, own = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != own:  # a fork of the process
            leave(status)
        raise SystemExit(status)

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave


@contextmanager
def _said_if_slow(what: str) -> Iterator[None]:
    line = f"mha: {what} has been loading for {SLOW:g} s"
    timer = Timer(SLOW, print, (line,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _own_interrupts_only() -> Iterator[None]:
    """Let through what Ctrl-C raises, but no interrupt of the code; end the block after `PATIENCE`."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler or current_thread() is not main_thread():
        yield
        return
    interrupts, late = list[int](), list[bool]()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if late:
            raise ImplementationError(f"it took longer than {PATIENCE:g} s to load")
        interrupts.append(number)
        raise KeyboardInterrupt

    def expire() -> None:
        late.append(True)
        signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)

    timer = Timer(PATIENCE, expire)
    timer.daemon = True
    signal.signal(signal.SIGINT, interrupt)
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        if interrupts:
            raise
        reason = "it raised KeyboardInterrupt, as if someone had stopped the run"
        raise ImplementationError(reason) from None
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, previous)
