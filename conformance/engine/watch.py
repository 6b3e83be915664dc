"""Watching another process: for how long it has been in a call, where it crashed, and why it ended, in words.

Nothing here imports torch.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import IO

# Of the two times of `mha.implementations.clock`, in bytes.
TIMES_SIZE = 16
# What takes no call at all may take so many times as long as a call: the judge's own work on a large case.
OUTSIDE_CALLS = 10
# In bytes.
LONGEST_TRACEBACK = 1 << 16
# A line of the traceback that Python writes when its process crashes.
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.M)
# Whose frames say nothing about the code that is judged.
OTHERS = (str(Path(__file__).parents[2]), str(Path(os.__file__).parent), "<")


class Times:
    """What the clock of another process shows; file: a file that both have mapped, memory alone if there is none."""

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self._map = mmap.mmap(file.fileno() if file else -1, TIMES_SIZE)
        self.shared = memoryview(self._map).cast("d")

    def restart(self) -> None:
        """Count from now on."""
        self.shared[0], self.shared[1] = 0.0, monotonic()

    def overdue(self, limit: float) -> str:
        """Return why the process has to be ended, in words, "" if it has not; limit: in seconds, of a call."""
        entered = self.shared[0]
        is_late = entered and monotonic() - entered > limit
        return f"a call did not return within {limit:g} s" if is_late else ""

    def idle(self, limit: float) -> str:
        """Return why a process that does nothing but judge has to be ended, in words, as `overdue` does."""
        is_idle = monotonic() - self.shared[1] > OUTSIDE_CALLS * limit
        return f"nothing was called for {OUTSIDE_CALLS * limit:g} s" if is_idle else ""

    def close(self) -> None:
        """Give the memory back."""
        self.shared.release()
        self._map.close()


def place_in(last_words: IO[bytes]) -> str:
    """Return where a process crashed, in words, by the traceback that Python wrote; "" if there is none."""
    last_words.seek(0)
    text = last_words.read(LONGEST_TRACEBACK).decode(errors="replace")
    frames = [match.groups() for match in FRAME.finditer(text)]
    own = [frame for frame in frames if not frame[0].startswith(OTHERS) and frame[0] != sys.argv[0]]
    theirs = [frame for frame in own if "site-packages" not in frame[0]]
    if not own:
        return ""
    file, line, name = (theirs or own)[0]
    return f", in {name} ({Path(file).name}, line {line})"


def why(status: int | None) -> str:
    """Return in words why a process ended.

    status: as of `subprocess.Popen.returncode`; None for one that still runs, but has closed its output.

    >>> why(0), why(-11)
    ('its process exited with status 0', 'its process was ended by SIGSEGV')
    """
    if status is None:
        return "its process closed its output"
    if status >= 0:
        return f"its process exited with status {status}"
    if status == -signal.SIGKILL:
        return "its process was killed, as where memory runs out"
    with suppress(ValueError):  # a number without a name
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process was ended by signal {-status}"
