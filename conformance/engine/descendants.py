"""Processes that code which is judged has started: none is left when the command ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Of Linux: a process with it becomes the parent of descendants whose own parent has ended.
PR_SET_CHILD_SUBREAPER = 36
# So many generations of processes are ended one after another.
GENERATIONS = 64


@contextmanager
def ending_descendants() -> Iterator[None]:
    """End all that was started in the block, and what that has started, at its end; on Linux.

    It is for a process of ours, which starts nothing that is to live longer.
    """
    before = _children()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        for _ in range(GENERATIONS):
            started = _children() - before
            if not started:
                break
            for child in started:
                _end(child)


def _end(child: int) -> None:
    with suppress(OSError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _children() -> set[int]:
    """Return the children of this process, also those that it has adopted."""
    with suppress(OSError):
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
        return {int(each) for each in text.split()}
    return set()
