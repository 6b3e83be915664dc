"""The command `mha`."""

from __future__ import annotations

import atexit
import gc
import io
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command.

    Characters that the output cannot encode are escaped. SIGTERM interrupts it as Ctrl-C does, and an output that is
    closed, as by `head`, ends it as it ends other programs.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    atexit.register(gc.freeze)  # spares the interpreter a last garbage collection through all of torch
    from mha.conformance.cli.app import app

    app(prog_name="mha")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Do what Ctrl-C does, also where that is ignored, as in a job that a shell started in the background."""
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(number, frame)
