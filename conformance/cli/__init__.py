"""The command `mha`."""

from __future__ import annotations

import atexit
import gc
import io
import sys


def main() -> None:
    """Run the command line; what its output cannot show is shown as code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    atexit.register(gc.freeze)  # at its end, the interpreter need not look through all of torch for garbage
    from mha.conformance.cli.app import app

    app()
