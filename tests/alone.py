"""Scripts run where neither this package nor what it needs besides torch can be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Run with the scripts as arguments: torch is imported once, and each script in a process of its own. Prints for each
# what ended it: the type of the exception, and its message.
RUNNER = """
import os, runpy, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mha", "einops", "hypothesis", "pytest", "rich", "typer"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import torch
for script in sys.argv[1:]:
    child = os.fork()
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


def run_alone(*scripts: Path) -> list[str]:
    """Return what ended each script: "passes", or its exception with the message."""
    command = [sys.executable, "-c", RUNNER, *map(str, scripts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()
