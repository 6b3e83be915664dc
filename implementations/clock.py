"""How long the code of an implementation has been running, for another process that ends it if it does not return."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

# Two times of the monotonic clock, which all processes of a machine share: when the code that is running was entered,
# 0 where none is, and when code was last entered or left.
TIMES = struct.Struct("dd")


class Clock:
    """The times of this process; memory: where they are written, which another process may read."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(TIMES.size))

    def share(self, memory: memoryview) -> None:
        """Write the times to shared memory from now on."""
        self.memory = memory
        seen(memory)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Note that the block runs code of an implementation; what is nested counts as part of it."""
        if TIMES.unpack_from(self.memory)[0]:
            yield
            return
        now = monotonic()
        TIMES.pack_into(self.memory, 0, now, now)
        try:
            yield
        finally:
            seen(self.memory)


CLOCK = Clock()


def seen(memory: memoryview) -> None:
    """Write that no code is running, from now on."""
    TIMES.pack_into(memory, 0, 0.0, monotonic())


def seconds_of(memory: memoryview) -> tuple[float, float]:
    """Return for how long code has been running, 0 if none is, and for how long no code was entered or left."""
    entered, seen = TIMES.unpack_from(memory)
    now = monotonic()
    return now - entered if entered else 0.0, now - seen
