"""Attention that works against its process: no run may end green, or without a word."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from mha.conformance.faults.base import Complete
from mha.conformance.faults.hostile import hostile
from mha.spec import Output

# Longer than any run waits.
FOREVER = 3600


@hostile
def exits_in_c(self: Complete, *rest: Any) -> Output:
    """Ends the process with status 0 behind Python's back."""
    ctypes.CDLL(None)._exit(0)
    return Complete.attend(self, *rest)


@hostile
def runs_another_program(self: Complete, *rest: Any) -> Output:
    """Replaces the process by a program that succeeds."""
    os.execv(sys.executable, [sys.executable, "-c", "pass"])
    return Complete.attend(self, *rest)


@hostile
def kills_itself(self: Complete, *rest: Any) -> Output:
    """Ends the process by a signal that nothing can catch."""
    os.kill(os.getpid(), signal.SIGKILL)
    return Complete.attend(self, *rest)


@hostile
def stops_itself(self: Complete, *rest: Any) -> Output:
    """Stops the process, which then neither ends nor goes on."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return Complete.attend(self, *rest)


@hostile
def holds_the_interpreter(self: Complete, *rest: Any) -> Output:
    """Never returns from C, and lets no other thread of Python run."""
    ctypes.PyDLL(None).sleep(FOREVER)
    return Complete.attend(self, *rest)


@hostile
def waits_for_a_lock(self: Complete, *rest: Any) -> Output:
    """Waits for a lock that it holds, and swallows what interrupts it."""
    lock = threading.Lock()
    lock.acquire()
    while True:
        with suppress(BaseException):
            lock.acquire()


@hostile
def forks_and_goes_on(self: Complete, *rest: Any) -> Output:
    """Returns twice, in two processes."""
    os.fork()
    return Complete.attend(self, *rest)


@hostile
def leaves_processes(self: Complete, *rest: Any) -> Output:
    """Correct, but starts a process of a session of its own in each call."""
    subprocess.Popen(["sleep", str(FOREVER + 1)], start_new_session=True)
    return Complete.attend(self, *rest)


@hostile
def closes_descriptors(self: Complete, *rest: Any) -> Output:
    """Closes all files, those of the judge too."""
    os.closerange(3, 256)
    return Complete.attend(self, *rest)


@hostile
def writes_to_descriptors(self: Complete, *rest: Any) -> Output:
    """Writes to all files that it finds open."""
    for descriptor in range(3, 64):
        with suppress(OSError):
            os.write(descriptor, b'{"verdict": {"status": "pass"}}\n')
    return Complete.attend(self, *rest)


@hostile
def ends_later(self: Complete, *rest: Any) -> Output:
    """Correct, but a thread ends the process a moment later."""

    def end() -> None:
        time.sleep(0.2)
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()
    return Complete.attend(self, *rest)
