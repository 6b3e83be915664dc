"""Watching another process: how long it has been in a call, where it crashed, and why it ended.

Nothing here imports torch.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import IO

# Of the three numbers of `mha.implementations.process.clock`, in bytes.
TIMES_SIZE = 24
# What takes no call at all, as the judge's own work on a large case, may take so many times as long
# as a call, and so many seconds at least.
OUTSIDE_CALLS, LEAST_OUTSIDE = 10, 600.0
# In bytes.
LONGEST_TRACEBACK = 1 << 16
# A line of the traceback that Python writes when its process crashes.
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.M)
# Whose frames say nothing about the code that is judged.
OTHERS = (str(Path(__file__).parents[2]), str(Path(os.__file__).parent), "<")


class Times:
    """What the clock of another process shows.

    file: a file that both have mapped; memory that a fork shares if there is none.
    shared: the three numbers, as `mha.implementations.process.clock.Clock` has them.
    """

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self._map = mmap.mmap(file.fileno() if file else -1, TIMES_SIZE)
        self.shared = memoryview(self._map).cast("d")

    def restart(self) -> None:
        """Count from now on."""
        self.shared[0], self.shared[1], self.shared[2] = 0.0, monotonic(), 1.0

    def overdue(self, limit: float) -> str:
        """Return why the process has to be ended, "" if it has not.

        limit: in seconds, of a call.
        """
        entered, _, times_as_long = self.shared
        if not entered or monotonic() - entered <= limit * times_as_long:
            return ""
        what = "it was not imported" if times_as_long > 1 else "a call did not return"
        return f"{what} within {limit * times_as_long:g} s (call_timeout = {limit:g})"

    def idle(self, limit: float) -> str:
        """Return why a process that does nothing but judge has to be ended, "" if it has not."""
        longest = max(LEAST_OUTSIDE, OUTSIDE_CALLS * limit)
        _, last_noted, _ = self.shared
        if monotonic() - last_noted > longest:
            return f"nothing was called for {longest:g} s"
        return ""

    def close(self) -> None:
        """Give the memory back."""
        self.shared.release()
        self._map.close()


class GarbledError(Exception):
    """A process has sent what is no message of ours."""


@dataclass(frozen=True)
class Ended:
    """The end of a process.

    why: in words.
    status: None if it did not end by itself.
    is_late: whether a call hung.
    is_ours: whether what hung is the judge.
    """

    why: str
    status: int | None = None
    is_late: bool = False
    is_ours: bool = False


def place_in(last_words: IO[bytes]) -> str:
    """Return where a process crashed, by the traceback that Python wrote; "" if there is none."""
    last_words.seek(0)
    text = last_words.read(LONGEST_TRACEBACK).decode(errors="replace")
    installed = ""
    for file, line, name in FRAME.findall(text):
        if file.startswith(OTHERS) or file == sys.argv[0]:
            continue
        place = f", in {name} ({Path(file).name}, line {line})"
        if "site-packages" not in file:
            return place
        installed = installed or place
    return installed


def why(status: int | None) -> str:
    """Return in words why a process ended.

    status: as of `subprocess.Popen.returncode`; None for one that still runs, but has closed its
    output.

    >>> why(0), why(-11)
    ('its process exited with status 0', 'its process was ended by SIGSEGV')
    """
    if status is None:
        return "its process closed its output"
    if status >= 0:
        return f"its process exited with status {status}"
    if status == -signal.SIGKILL:
        return "its process was killed (SIGKILL), perhaps for want of memory"
    with suppress(ValueError):  # a number without a name
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process was ended by signal {-status}"
