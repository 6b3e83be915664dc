"""Scripts run where neither this package nor what it needs besides torch can be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Imports torch once, reads the places of scripts, and runs each in a process of its own. Prints
# what ended it: the type of the exception, and its message.
RUNNER = """
import os, runpy, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mha", "einops", "hypothesis", "pytest", "rich", "typer"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import torch
for line in sys.stdin:
    child, script = os.fork(), line.strip()
    if child:
        os.waitpid(child, 0)
        continue
    ended = "passes"
    sys.path[0] = os.path.dirname(script)
    try:
        with open(os.devnull, "w") as sys.stdout:
            runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        ended = f"{type(error).__name__}: {error}"
    os.write(1, (ended.replace("\\n", " ") + "\\n").encode())
    os._exit(0)
"""


class Alone:
    """Runs scripts, one after another."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", RUNNER]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, script: Path) -> str:
        """Return what ended a script: "passes", or its exception with the message."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{script}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
