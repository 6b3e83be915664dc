"""Many candidates at once, each below a supervisor that ends all that it has started."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mha.conformance.candidates.one import Line, Terms, judge_file
from mha.conformance.engine.descendants import adopt_orphans, kill_descendants
from mha.conformance.engine.watch import why

# Of a line, in bytes.
LONGEST = 1 << 20


@dataclass(frozen=True)
class Running:
    """A candidate that is being judged.

    pipe: where its supervisor writes the line.
    """

    path: Path
    supervisor: int
    pipe: int


def judge_all(paths: Iterable[Path], terms: Terms, jobs: int = 1) -> Iterator[Line]:
    """Judge files, so many at once, and yield what there is to say about each as it ends.

    A crash, a hang, a candidate without end of memory or of processes costs that candidate alone:
    its outcome is "crashed", "timeout" or "memory". That is no sandbox: a candidate may read and
    write what this user may. This process must not have used torch's threads or a GPU before.

    Each line has the file, its SHA-256, the outcome, the clauses that failed, why, the seconds,
    and a reward: 1 for a right kernel, and less than a half for any other.
    """
    torch.set_num_threads(1)  # a fork has no other threads
    waiting, running = list(paths), dict[int, Running]()
    waiting.reverse()
    while waiting or running:
        while waiting and len(running) < jobs:
            started = _start(waiting.pop(), terms)
            running[started.pipe] = started
        ready, _, _ = select.select(list(running), [], [])
        for pipe in ready:
            ended = running.pop(pipe)
            yield _line(ended)


def judge_into(output: Path, paths: Iterable[Path], terms: Terms, jobs: int) -> str:
    """Judge the files of which a file of JSON lines says nothing, and append what there is to say.

    Returns a summary: how many there are of each outcome, and how many were known.
    """
    known = judged_before(output)
    todo = list[Path]()
    skipped = 0
    for path in paths:
        if (str(path), sha_of(path)) in known:
            skipped += 1
        else:
            todo.append(path)
    outcomes = Counter[str]()
    is_cut = output.exists() and not output.read_bytes().endswith(b"\n")
    with output.open("a", encoding="utf-8") as lines:
        if is_cut and lines.tell():
            lines.write("\n")  # after half a line, of a run that was stopped
        for line in judge_all(todo, terms, jobs):
            lines.write(json.dumps(line) + "\n")
            lines.flush()
            outcomes[line["outcome"]] += 1
    counts = [f"{count} {outcome}" for outcome, count in sorted(outcomes.items())]
    if skipped:
        counts.append(f"{skipped} known from before")
    return ", ".join(counts) or "no candidates"


def sha_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def judged_before(output: Path) -> set[tuple[str, str]]:
    """Return the files, with their SHA-256, of which a file of lines says something."""
    found = set[tuple[str, str]]()
    if not output.exists():
        return found
    for text in output.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
            found.add((line["file"], line["sha256"]))
        except (ValueError, KeyError, TypeError):
            continue  # half a line, of a run that was stopped
    return found


def _start(path: Path, terms: Terms) -> Running:
    """Start a supervisor, which writes one line into a pipe and ends."""
    reading, writing = os.pipe()
    supervisor = os.fork()
    if supervisor:
        os.close(writing)
        return Running(path, supervisor, reading)
    try:
        os.close(reading)
        os.setsid()
        line = _supervised(path, terms)
        os.write(writing, json.dumps(line).encode()[:LONGEST])
    finally:
        os._exit(0)


def _line(ended: Running) -> Line:
    """Return the line of a candidate whose supervisor has written it, or ended without it."""
    parts = list[bytes]()
    while part := os.read(ended.pipe, LONGEST):
        parts.append(part)
    os.close(ended.pipe)
    os.waitpid(ended.supervisor, 0)
    line: Line = {"file": str(ended.path), "sha256": sha_of(ended.path)}
    try:
        line.update(json.loads(b"".join(parts)))
    except ValueError:
        line.update({"outcome": "crashed", "why": "with its supervisor", "reward": 0.0})
    return line


def _supervised(path: Path, terms: Terms) -> Line:
    """Judge a file in a child, for a limited time, and end all that it has started."""
    adopt_orphans()
    start = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _judge(path, terms, writing)
    os.close(writing)
    found: Line | None = _read(reading, start + terms.timeout)
    seconds = round(time.monotonic() - start, 3)
    if found is None:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        found = {"outcome": "timeout", "why": f"after {terms.timeout:g} s", "reward": 0.0}
    elif not found:
        _, status = os.waitpid(child, 0)
        end = why(os.waitstatus_to_exitcode(status))
        found = {"outcome": "crashed", "why": end, "reward": 0.0}
    kill_descendants()
    found["seconds"] = seconds
    return found


def _judge(path: Path, terms: Terms, writing: int) -> None:
    """Judge a file in this process, write what there is to say, and end."""
    line: Line = {}
    try:
        line = judge_file(path, terms)
    except MemoryError:
        line = {"outcome": "memory", "why": f"more than {terms.memory} MiB", "reward": 0.0}
    except BaseException as error:  # of the judge, or of what a candidate left in it
        line = {"outcome": "crashed", "why": f"{type(error).__name__}: {error}", "reward": 0.0}
    finally:
        os.write(writing, json.dumps(line).encode() + b"\n")
        os._exit(0)


def _read(pipe: int, deadline: float) -> Any:
    """Return the line that a child writes; {} if it ends without one, None after the deadline."""
    text = b""
    while not text.endswith(b"\n"):
        left = deadline - time.monotonic()
        ready, _, _ = select.select([pipe], [], [], max(0.0, left))
        if not ready:
            return None
        part = os.read(pipe, LONGEST)
        if not part:
            return {}
        text += part
    try:
        return json.loads(text)
    except ValueError:
        return {}
