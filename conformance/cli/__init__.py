"""The command `mha`."""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import traceback
from contextlib import suppress
from types import FrameType


def main() -> None:
    """Run the command.

    Characters that the output cannot encode are escaped. SIGTERM interrupts it as Ctrl-C does, and
    an output that is closed while it runs, as by `head`, ends it as it ends other programs. Code
    that is judged runs in other processes.
    """
    _open_streams()
    try:
        os.getcwd()
    except FileNotFoundError:
        print(
            "mha: the current folder does not exist any more; change to another one",
            file=sys.stderr,
        )
        sys.exit(2)
    signal.signal(signal.SIGTERM, _interrupt)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    from mha.conformance.cli.app import app
    from mha.conformance.engine.descendants import ending_descendants

    status: object = 2
    try:
        with ending_descendants():
            app(prog_name="mha")
    except SystemExit as end:
        status = end.code or 0
    except KeyboardInterrupt:
        print("mha: interrupted", file=sys.stderr)
    except Exception:
        traceback.print_exc()
        print("mha: this is an error of mha-conformance; please report it", file=sys.stderr)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # it may be closed
            stream.flush()
    # Threads, such as those of a library, are not waited for.
    os._exit(status if isinstance(status, int) else 1)


def _open_streams() -> None:
    """Open standard streams that are closed on nothing, since files that are opened would take
    their numbers.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115  it is open to the end
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115  the same
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Do what Ctrl-C does, also where that is ignored, as in a job that a shell started in the
    background.
    """
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(number, frame)
