"""Python commands in forks of a process that has imported torch, which takes each new one some seconds."""

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

# Forks for each line of its input, and answers with the exit status. The fork ends as Python does, with its threads and
# what `atexit` has, which the server of `multiprocessing` would skip.
SERVER = """
import json, os, runpy, sys

import einops, jinja2, pydantic, rich.console, torch, typer

given = None
for line in sys.stdin:
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        given = json.loads(line)
        break
if given:
    module, arguments, folder, environment = given
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    for number, name in enumerate(("in", "out", "err")):
        os.dup2(os.open(os.path.join(environment["FILES"], name), os.O_RDWR), number)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def run_module(
    module: str,
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: int = 300,
) -> subprocess.CompletedProcess[str]:
    """Do as `subprocess.run` of `python -m module`, with its output as text."""
    environment = dict(os.environ if env is None else env)
    if not hasattr(os, "fork"):
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.run(
            command, cwd=cwd, env=environment, timeout=timeout, capture_output=True, text=True, check=False
        )
    with TemporaryDirectory() as folder:
        files = {name: Path(folder, name) for name in ("in", "out", "err")}
        for file in files.values():
            file.touch()
        request = module, arguments, str(cwd or Path.cwd()), environment | {"FILES": folder}
        status = _answer(json.dumps(request), timeout)
        if not status:
            raise subprocess.TimeoutExpired([module, *arguments], timeout)
        out, err = files["out"].read_text(), files["err"].read_text()
    return subprocess.CompletedProcess([module, *arguments], int(status), out, err)


def _answer(request: str, timeout: int) -> str:
    """Return the exit status in digits, or nothing if the time was up and all processes were killed."""
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
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
