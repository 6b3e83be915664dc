"""Python commands in forks of a process that has imported torch and most of this package.

That takes seconds. What imports Hypothesis is left out: pytest warns of plugins that it finds
imported.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer

# Forks for each line of its input, and answers with the exit status. The fork ends as Python does,
# with its threads and what `atexit` has, which the server of `multiprocessing` would skip.
SERVER = """
import json, os, runpy, sys

import einops, jinja2, pydantic, rich.console, torch, typer

import mha.conformance.harness.session
import mha.implementations.inference.infer
from mha.conformance.engine import guard

guard.may_fork = lambda: True  # torch is imported, and nothing has run on it

given = None
for line in sys.stdin:
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        given = json.loads(line)
        break
if given:
    module, arguments, folder, environment, files = given
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    for number, file in enumerate(files):
        os.dup2(os.open(file, os.O_RDWR), number)
    # The old ones are of pipes.
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def run_module(
    module: str,
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: int = 300,
    terminal: str = "",
) -> subprocess.CompletedProcess[str]:
    """Do as `subprocess.run` of `python -m module`, with text; at a terminal, if it has a path."""
    environment = dict(os.environ if env is None else env)
    if not hasattr(os, "fork"):
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
        )
    with TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("in", "out", "err")]
        for file in files:
            file.touch()
        given = [terminal] * 3 if terminal else [str(file) for file in files]
        status = _answer(
            json.dumps((module, arguments, str(cwd or Path.cwd()), environment, given)), timeout
        )
        if not status:
            raise subprocess.TimeoutExpired([module, *arguments], timeout)
        _, out, err = (file.read_text() for file in files)
    return subprocess.CompletedProcess([module, *arguments], int(status), out, err)


def _answer(request: str, timeout: int) -> str:
    """Return the exit status in digits, or nothing if the time was up."""
    server = _server()
    assert server.stdin
    assert server.stdout
    overdue = Timer(timeout, os.killpg, (server.pid, signal.SIGKILL))
    overdue.start()
    try:
        server.stdin.write(f"{request}\n")
        server.stdin.flush()
        status = server.stdout.readline()
    finally:
        overdue.cancel()
    if not status:
        _server.cache_clear()
    return status


@cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SERVER]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
