"""The command `mha`."""

from __future__ import annotations

import atexit
import gc
import io
import signal
import sys


def main() -> None:
    """Run the command.

    Characters that the output cannot encode are escaped. SIGTERM interrupts it as Ctrl-C does, and an output that is
    closed, as by `head`, ends it as it ends other programs.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    atexit.register(gc.freeze)  # spares the interpreter a last garbage collection through all of torch
    from mha.conformance.cli.app import app

    app(prog_name="mha")
