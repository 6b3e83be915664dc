"""A process that judges while others still infer: as the version before was understood.

Inferring takes up to seconds, judging a case hundredths. What fails is said at once, and is no
verdict: the new version may be understood otherwise.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from mha.conformance.engine.found import Request
from mha.conformance.engine.watch import GarbledError

if TYPE_CHECKING:
    from mha.conformance.engine.worker import Worker
    from mha.conformance.results import Verdict
    from mha.conformance.settings import Settings, Task


class Ahead:
    """The process, if there is one: without it, nothing is lost but time.

    tasks: what it is to judge of the first target, each with its settings.
    """

    def __init__(self) -> None:
        self.tasks: list[tuple[Task, Settings]] = []
        self._worker: Worker | None = None

    @property
    def channels(self) -> list[socket.socket]:
        """What it says comes through these: one or none."""
        return [self._worker.channel] if self._worker else []

    def start(self, beside: Sequence[Worker]) -> None:
        """Fork the process, before anything is imported; beside: the others."""
        from mha.conformance.engine.worker import Worker

        with suppress(OSError):
            self._worker = Worker.forked(beside)

    def begin(self, targets: tuple[str, ...], declarations: Mapping[str, str]) -> None:
        """Let the process judge what the declarations make of the targets."""
        if self._worker is None or not self.tasks:
            return
        self._worker.send(Request(targets, declarations, as_declared=True))
        for task, settings in self.tasks:
            self._worker.send((targets[0], task, settings))

    def hear(self, failing: Callable[[Verdict], object]) -> None:
        """Give `failing` the failures that were said since the last look, and note the end."""
        from mha.conformance.results import read_verdict

        if self._worker is None:
            return
        try:
            said = self._worker.received()
        except GarbledError:
            said = None
        if said is None:
            self.end()
        for message in said or ():
            with suppress(ValueError):  # of code that has found the channel
                if "failing" in message:
                    failing(read_verdict(message["failing"]))

    def end(self) -> None:
        """End the process, whatever it is doing."""
        if self._worker:
            self._worker.end()
        self._worker = None
