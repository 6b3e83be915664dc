"""Processes that judged code has started: none is left when the command ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

# Of Linux: a process with it becomes the parent of descendants whose own parent has ended.
PR_SET_CHILD_SUBREAPER = 36
# So many generations of a process are looked for.
GENERATIONS = 64


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parent ends, so that they can be found; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans() -> None:
    """End the processes that were adopted and those that they have started, but none that this process has started.

    It is called once the processes that judge are ended, so what is left is theirs.
    """
    for _ in range(GENERATIONS):
        left = _children()
        if not left:
            return
        for child in left:
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
            with suppress(OSError):
                os.waitpid(child, 0)


def _children() -> list[int]:
    """Return the children of this process."""
    with suppress(OSError):
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
        return [int(each) for each in text.split()]
    return []
