"""Torch as it was at first, for our own arithmetic, and as it was found, for judged code.

What was replaced or set in torch before, as by the import of a package, is in place while the
implementation runs, and at no other time within `pristine`. What the implementation prints would
bury the report, and is dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, TextIO, cast

from mha.implementations.process.clock import CLOCK
from mha.implementations.process.surroundings import Surroundings
from mha.implementations.process.torch_state import (
    MISSING,
    SETTINGS,
    Replacements,
    preserved,
    replace_by,
    replacements,
    set_to,
    settings,
)

# The settings that each call has for itself.
OF_CALLS = (
    "the gradient mode",
    "torch's random state",
    "Python's random state",
    "the number of threads",
)
# Our own settings: those of torch when this module was imported.
OWN = {name: value for name, value in settings().items() if name not in OF_CALLS} | {
    "the gradient mode": True
}
# Modules whose output is shown all the same: the debugger, in code that is judged, and our progress
# bar, from a thread.
SHOWN = ("IPython", "bdb", "cmd", "ipdb", "pdb", "prompt_toolkit", "pudb", "rich")


@dataclass
class _Process:
    """What was found before the block of `pristine` that is entered, if one is.

    replaced: what code that ran `as_found` replaced, since the last look.
    changed: what else it did, in words.
    inside: whether a block of `pristine` is entered.
    outside: whether, in it, the process is as it was found.
    running: whether a block of `as_found` is entered, so that judged code may be running.
    thread: that which entered `pristine`, else 0.
    """

    functions: Replacements = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    inside: bool = False
    outside: bool = False
    running: bool = False
    thread: int = 0


_process = _Process()


@contextmanager
def pristine() -> Iterator[None]:
    """Let the block compute with torch as it was at first; leave the process as it was found."""
    if _process.inside:
        yield
        return
    found, before = replacements(), settings()
    _process.functions = found
    _process.settings = {}
    for name, value in OWN.items():
        if name not in OF_CALLS and before[name] != value:
            _process.settings[name] = before[name]
    _process.inside, _process.thread = True, get_ident()
    with preserved():
        replace_by({})
        set_to(OWN)
        try:
            yield
        finally:
            replace_by(found)
            _process.replaced.clear()
            _process.changed.clear()
            _process.inside, _process.thread = False, 0


@contextmanager
def as_found() -> Iterator[None]:
    """Let code of an implementation run in the process as it was found, and print nothing."""
    if _process.running:
        with silenced(), _as_found():
            yield
        return
    with CLOCK.running(), silenced(), _as_found():
        before, _process.running = Surroundings(), True
        try:
            yield
        finally:
            _process.running = False
            _process.changed |= set(before.put_back())


def may_answer() -> bool:
    """Return whether no judged code is running, and this is the thread that judges, if one does."""
    return not _process.running and _process.thread in (0, get_ident())


@contextmanager
def _as_found() -> Iterator[None]:
    if not _process.inside or _process.outside or not (_process.functions or _process.settings):
        yield
        return
    _process.outside = True
    replace_by(_process.functions)
    set_to(_process.settings)
    try:
        yield
    finally:
        _process.replaced |= set(replace_by(_process.functions))
        replace_by({})
        # A setting that the code has changed stays so, to be noticed.
        kept = [name for name, x in _process.settings.items() if SETTINGS[name].read() == x]
        set_to({name: OWN[name] for name in kept})
        _process.outside = False


class Silenced:
    """Standard output that drops what is written, except by `SHOWN`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Drop the text, or write it."""
        writer = str(sys._getframe(1).f_globals.get("__name__"))
        return self.stream.write(text) if writer.partition(".")[0] in SHOWN else len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Drop the lines."""

    def __getattr__(self, name: str) -> object:
        """Return what the stream has of this name."""
        return getattr(self.stream, name)


@contextmanager
def silenced() -> Iterator[None]:
    """Drop what the block prints; standard error is left alone."""
    if isinstance(sys.stdout, Silenced) or sys.stdout is None:
        yield
        return
    with redirect_stdout(cast(TextIO, Silenced(sys.stdout))):
        yield


@contextmanager
def as_our_own() -> Iterator[None]:
    """Let code that stands in for an implementation run like our own."""
    before = _process.outside, _process.running
    _process.outside, _process.running = True, False
    try:
        yield
    finally:
        _process.outside, _process.running = before


def put_back() -> str:
    """Undo what code that ran as found has replaced; return in words what it did, "" if nothing."""
    names = _process.replaced | set(replace_by({}))
    done = sorted(_process.changed)
    if names:
        done.insert(0, f"replaced {', '.join(sorted(names))}")
    _process.replaced.clear()
    _process.changed.clear()
    return " and ".join(done)


def torch_changes() -> tuple[str, ...]:
    """Return in words what is replaced or set in torch; not for use within `pristine`.

    >>> import torch
    >>> torch.set_default_dtype(torch.float64)
    >>> torch_changes()
    ('the default dtype (torch.float64)',)
    >>> torch.set_default_dtype(torch.float32)
    """
    changes = [f"{name} ({_origin(value)})" for name, value in sorted(replacements().items())]
    values = settings()
    for name, own in OWN.items():
        if values[name] != own:
            changes.append(f"{name} ({values[name]})")
    return tuple(changes)


def _origin(value: object) -> str:
    """Return in words where something comes from that stands in torch."""
    if value is MISSING:
        return "deleted"
    return f"from {getattr(value, '__module__', None) or 'elsewhere'}"
