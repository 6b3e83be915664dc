"""The command `mha`."""

from __future__ import annotations

import atexit
import gc
import io
import sys


def main() -> None:
    """Run the command; characters that the output cannot encode are escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    atexit.register(gc.freeze)  # spares the interpreter a last garbage collection through all of torch
    from mha.conformance.cli.app import app

    app(prog_name="mha")
