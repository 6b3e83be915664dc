"""What code that is judged prints would bury the report: it is dropped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO, cast

# Modules whose output is shown all the same: the debugger, in code that is judged, and our progress bar, from a thread.
SHOWN = ("bdb", "cmd", "pdb", "rich")


class Silenced:
    """Standard output that drops what is written, except by `SHOWN`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Drop the text, or write it."""
        writer = str(sys._getframe(1).f_globals.get("__name__"))
        return self.stream.write(text) if writer.partition(".")[0] in SHOWN else len(text)

    def __getattr__(self, name: str) -> object:
        """Return what the stream has of this name."""
        return getattr(self.stream, name)


@contextmanager
def silenced() -> Iterator[None]:
    """Drop what the block prints; standard error is left alone."""
    if isinstance(sys.stdout, Silenced) or sys.stdout is None:
        yield
        return
    with redirect_stdout(cast(TextIO, Silenced(sys.stdout))):
        yield
