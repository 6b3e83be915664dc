"""How long the code of an implementation has been running, for another process that ends it if it does not return."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic


class Clock:
    """Two times of the monotonic clock, which all processes of a machine share.

    times[0]: when the code that is running was entered, 0 where none is. times[1]: when code was last entered or left.
    """

    def __init__(self) -> None:
        self.times: memoryview[float] = memoryview(array("d", (0.0, 0.0)))

    def share(self, times: memoryview[float]) -> None:
        """Write the times to two numbers in memory that another process reads, from now on."""
        self.times = times
        self._note(0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Note that the block runs code of an implementation; what is nested counts as part of it."""
        if self.times[0]:
            yield
            return
        self._note(monotonic())
        own = os.getpid()
        try:
            yield
        finally:
            if os.getpid() != own:  # a fork that came back, and would go on as if it were this process
                os._exit(0)
            self._note(0.0)

    def _note(self, entered: float) -> None:
        self.times[0], self.times[1] = entered, monotonic()


CLOCK = Clock()
