"""At a terminal, lines fit its width, unless a word, a path or code is wider."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from support.forks import run_module
from support.reports_made import two_implementations

pty = pytest.importorskip("pty", reason="there are no pseudo-terminals")

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
OUTPUTS = {
    "report": ["report"],
    "replay": ["replay", "--impl", "loop"],
    "list": ["list"],
    "index": ["spec"],
    "page": ["spec", "MSK-8"],
    "a failure": ["show", "MSK-8"],
    "an unknown name": ["check", "no_such_implementation"],
    "an ambiguous name": ["waive", "MSK", "--reason", "known"],
    "a check": [
        "check",
        "loop",
        "minimal",
        "--clause",
        "CFG-3,SHP-5,SHP-7",
        "--profile",
        "quick",
        "--dtype",
        "float32",
    ],
}
# In columns: of the longest label or indent, after which a word may be too long to fold.
LABEL = 24


def read_all(screen: int) -> bytes:
    """Read what is shown until nobody has the terminal open."""
    shown = b""
    with suppress(OSError):
        while True:
            shown += os.read(screen, 1 << 16)
    return shown


def at_terminal(arguments: list[str], columns: int, folder: Path) -> list[str]:
    """Run `mha` at a terminal of this width, and return the lines that it shows."""
    import fcntl
    import struct
    import termios

    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    # Not the environment of the process, to which readline may have added COLUMNS.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
    }
    environment["TERM"] = "xterm-256color"
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read_all, screen)
        try:
            run_module(
                "mha.conformance",
                *arguments,
                cwd=folder,
                env=environment,
                terminal=os.ttyname(terminal),
            )
        finally:
            os.close(terminal)
        shown = reading.result()
    os.close(screen)
    # A progress bar is drawn again and again over its own line.
    return [
        line.rpartition("\r")[2]
        for line in ESCAPES.sub("", shown.decode()).replace("\r\n", "\n").split("\n")
    ]


@pytest.mark.mostly_slow(6)
@pytest.mark.parametrize("columns", [40, 200])
@pytest.mark.parametrize("output", OUTPUTS)
def test_lines_fit_the_terminal(output: str, columns: int, tmp_path: Path) -> None:
    (tmp_path / ".mha").mkdir()
    (tmp_path / ".mha" / "last.json").write_text(two_implementations().to_json())
    lines = at_terminal(OUTPUTS[output], columns, tmp_path)
    text = "\n".join(lines)
    assert len(text) > 40
    assert "Traceback" not in text
    before_the_script = text.partition("and run it:")[0].split("\n")
    too_long = [line for line in before_the_script if len(line) > columns]
    assert [line for line in too_long if line.rfind(" ") >= LABEL] == []
