"""How long the code of an implementation has been running, for another process that ends it."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic


class Clock:
    """Two times of the monotonic clock, which all processes of a machine share.

    times[0]: when the code that is running was entered, 0 where none is.
    times[1]: when code was last entered or left.
    times[2]: how many times as long as a call it may take.
    """

    def __init__(self) -> None:
        self.times: memoryview[float] = memoryview(array("d", (0.0, 0.0, 1.0)))

    def share(self, times: memoryview[float]) -> None:
        """Write the times to two numbers in memory that another process reads, from now on."""
        self.times = times
        self._note(0.0)

    @contextmanager
    def running(self, *, times_as_long: float = 1.0) -> Iterator[None]:
        """Note that the block runs code of an implementation.

        Where blocks are nested, as the calls of a gradient check are, the time counts from the last
        one. times_as_long: as a call it may take.
        """
        is_nested, before = self.times[0] > 0, self.times[2]
        if is_nested:
            times_as_long = max(before, times_as_long)
        self._note(monotonic(), times_as_long)
        own = os.getpid()
        try:
            yield
        finally:
            if os.getpid() != own:
                # A fork that came back would go on as if it were this process.
                os._exit(0)
            self._note(monotonic() if is_nested else 0.0, before)

    def _note(self, entered: float, times_as_long: float = 1.0) -> None:
        self.times[2], self.times[1], self.times[0] = times_as_long, monotonic(), entered


CLOCK = Clock()
