"""Processes that judged code has started: none is left when the command, or a job, ends.

Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

# Of `prctl`, from linux/prctl.h.
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# In seconds: for all that was started to end.
GRACE = 2.0


@contextmanager
def ending_descendants() -> Iterator[None]:
    """End all that was started in the block, and what that has started, at its end; on Linux.

    It is for a process of ours, which starts nothing that is to live longer.
    """
    if sys.platform != "linux":
        yield
        return
    before = descendants()
    adopt_orphans()
    try:
        yield
    finally:
        kill_descendants(before)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends; Linux only."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(parent: int) -> None:
    """Let this process be killed when its parent ends, or end it now if it has; Linux only."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def kill_descendants(besides: Collection[int] = ()) -> None:
    """Kill all that descends from this process, besides some, for at most `GRACE`."""
    deadline = monotonic() + GRACE
    while (left := descendants().difference(besides)) and monotonic() < deadline:
        for process in left:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
            # It may be the child of another descendant, which is killed too.
            with suppress(OSError):
                os.waitpid(process, os.WNOHANG)
        sleep(0.01)


def descendants() -> set[int]:
    """Return the processes that descend from this one and have not ended."""
    parents = {}
    # Not `glob`, which raises where a process ends meanwhile.
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError, ValueError, IndexError):
            text = Path("/proc", name, "stat").read_text(errors="replace")
            # After the name of the program in parentheses, which may hold anything.
            state, parent, *_ = text.rpartition(")")[2].split()
            if state != "Z":
                parents[int(name)] = int(parent)
    found, new = set[int](), {os.getpid()}
    while new:
        new = {process for process, parent in parents.items() if parent in new}
        found |= new
    return found
