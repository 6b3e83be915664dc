"""The inside of a process that judges: it answers each task with a verdict, as JSON.

What an implementation prints goes to standard error.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import mmap
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from queue import SimpleQueue
from threading import Thread
from typing import IO, TYPE_CHECKING, Any, TextIO

from mha.conformance.engine.watch import TIMES_SIZE
from mha.implementations.discovery.errors import INTERRUPTED
from mha.implementations.process.clock import CLOCK

if TYPE_CHECKING:
    from mha.conformance.engine.found import Request
    from mha.conformance.engine.search import Failure
    from mha.conformance.properties.registry import Property
    from mha.conformance.results import Verdict
    from mha.conformance.settings import Settings, Task
    from mha.implementations import Resolved
    from mha.implementations.discovery.resolve import Found

Say = Callable[[dict[str, Any]], None]
# The streams of the command, which are not used here, as a lock of theirs may be held; they would
# close with the last reference to them, and so would the descriptors.
FORMER: list[object] = []


def work(channel: socket.socket, times: memoryview[float], last_words: IO[bytes]) -> None:
    """Judge what comes through the channel until it ends.

    times: where `CLOCK` is shared.
    last_words: where the traceback goes if the process crashes.
    """
    _prepare(times, last_words)
    tasks: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_read, args=(channel, tasks), daemon=True).start()
    token, sys.path[:] = tasks.get()
    own = os.getpid()

    def say(answer: dict[str, Any]) -> None:
        if os.getpid() != own:  # a fork that code which is judged has made
            os._exit(1)
        channel.sendall(f"{token} {json.dumps(answer)}\n".encode())

    with suppress(BrokenPipeError):
        _judge_what_comes(tasks, say)


def work_by_itself(channel: int, times: int, last_words: int) -> None:
    """Do the same in a Python of its own, which has inherited these descriptors."""
    memory = mmap.mmap(times, TIMES_SIZE)
    work(
        socket.socket(fileno=channel),
        memoryview(memory).cast("d"),
        os.fdopen(last_words, "wb", buffering=0),
    )


def _prepare(times: memoryview[float], last_words: IO[bytes]) -> None:
    """Set up the process: its streams, what signals do, and what is left of it in a crash."""
    # What is judged may read, but not from the user.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    FORMER.extend((sys.stdin, sys.stdout, sys.stderr))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  it is open to the end, as the others are
    sys.stdout, sys.stderr = _text_stream(1), _text_stream(2)
    # As a Python of its own has them, whatever the command has.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    faulthandler.enable(last_words, all_threads=False)
    CLOCK.share(times)
    _yield_to_others()


def _text_stream(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)


def _yield_to_others() -> None:
    """Let this process be the one that ends where memory runs out, and leave no core behind."""
    if sys.platform != "linux":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def _read(channel: socket.socket, tasks: SimpleQueue[Any]) -> None:
    """Queue what comes; at its end, as where the command was killed, end the process at once."""
    with suppress(Exception), channel.makefile("rb") as messages:  # the end, or what cannot be read
        while True:
            tasks.put(pickle.load(messages))
    os._exit(0)


def _judge_what_comes(tasks: SimpleQueue[Any], say: Say) -> None:
    """Find what is to be judged, say what it is, and judge what comes until it ends."""
    from mha.conformance.harness.isolation import gpu_is_lost

    request = tasks.get()
    known = _found(request, say)
    if known is None:
        return
    gc.freeze()  # what is loaded stays, and is not searched for garbage again
    is_lost = False
    while not is_lost:
        target, task, settings = tasks.get()
        verdict = _judged(known[target], task, settings, say)
        is_lost = gpu_is_lost()
        say({"verdict": asdict(verdict), "lost": is_lost})


def _judged(resolved: Resolved, task: Task, settings: Settings, say: Say) -> Verdict:
    """Return the verdict on one clause, and say at once what the first failing case shows."""
    from mha.conformance.engine.judge import judge, seen_at_once
    from mha.conformance.engine.search import told_at_once

    def hears(prop: Property, failure: Failure) -> None:
        name = resolved.implementation.name
        say({"failing": asdict(seen_at_once(name, task, settings, prop, failure))})

    with told_at_once(hears):
        return judge(resolved, task.clause, task.dtype, task.device, settings)


def _found(request: Request, say: Say) -> dict[str, Resolved] | None:
    """Import all that is judged, in order, and say what it is; return it by the target.

    None where it cannot be used, which is said too.
    """
    from mha.conformance.engine import subjects
    from mha.conformance.settings import by_name
    from mha.implementations.process.pristine import torch_changes

    loading, before = "", set(sys.modules)

    def note(target: str) -> None:
        nonlocal loading
        loading = target
        say({"finding": target})

    with nullcontext() if request.is_heard else _muted():
        try:
            found, why_declared = _find(request, note)
            chosen = by_name(found.resolved)
        except ValueError as error:
            say({"error": str(error)})
            return None
        except KeyboardInterrupt:  # no Ctrl-C reaches this process
            say({"error": f"{loading!r} cannot be used: {INTERRUPTED}"})
            return None
        finally:
            if request.is_heard and request.declarations is not None:
                from mha.conformance.sources import modules_since

                say({"files": modules_since(before)})
    known = {
        "found": subjects.written(list(chosen.values())),
        "broken": found.broken,
        "notes": list(found.notes),
        "why_declared": why_declared,
    }
    say(known | {"torch_changes": torch_changes()})
    return {each.target: each for each in found.resolved}


def _find(request: Request, note: Callable[[str], None]) -> tuple[Found, str]:
    """Return what the targets name, and why they are as declared before, "" where they are not.

    note: is given each target before it is imported.

    Raises ValueError where one cannot be used, as declared before either.
    """
    from mha.implementations.discovery.resolve import find

    if request.as_declared:
        return _as_declared(request), ""
    try:
        return find(request.targets, note), ""
    except ValueError as error:
        declarations = request.declarations or {}
        if not all(target in declarations for target in request.targets):
            raise
        with suppress(ValueError):
            return _as_declared(request), str(error)
        raise error


def _as_declared(request: Request) -> Found:
    """Return what the targets name, as they were understood before; raise ValueError."""
    from mha.implementations.discovery.redeclared import resolve_as_declared
    from mha.implementations.discovery.resolve import Found

    declarations = request.declarations or {}
    return Found([resolve_as_declared(each, declarations[each]) for each in request.targets])


@contextmanager
def _muted() -> Iterator[None]:
    """Drop all that the block prints, also by other means than Python's."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for number in (1, 2):
            os.dup2(kept, number)
        os.close(kept)
        os.close(nowhere)
