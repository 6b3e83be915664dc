"""The command `mha`."""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Run the command.

    Characters that the output cannot encode are escaped. SIGTERM interrupts it as Ctrl-C does, and an output that is
    closed, as by `head`, ends it as it ends other programs. The exit status is that of the command, whatever the code
    of an implementation does to end the process: its `os._exit` raises SystemExit, and its threads are not waited for.
    """
    leave, own = os._exit, os.getpid()

    def exit_refused(status: int) -> NoReturn:
        if os.getpid() != own:  # a fork of the process
            leave(status)
        raise SystemExit(status)

    os._exit = exit_refused
    signal.signal(signal.SIGTERM, _interrupt)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    from mha.conformance.cli.app import app

    status: object = 2  # unless the command exits: what is judged may have replaced `sys.exit`
    try:
        app(prog_name="mha")
    except SystemExit as end:
        status = end.code or 0
    except BaseException as error:
        if isinstance(error, (Exception, KeyboardInterrupt)):
            raise
        name = type(error).__name__
        print(f"mha: the code to be judged raised {name}, which should derive from Exception", file=sys.stderr)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # it may be closed
            stream.flush()
    leave(status if isinstance(status, int) else 1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Do what Ctrl-C does, also where that is ignored, as in a job that a shell started in the background."""
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(number, frame)
