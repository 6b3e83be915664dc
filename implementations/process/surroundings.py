"""The process around a call: what a call may set for everybody beside torch, and is put back.

What no ordinary call sets is named, for STA-5. The rest is put back without a word: packages set
variables of the environment, and add folders to `sys.path`, where they are imported for the first
time.
"""

from __future__ import annotations

import gc
import importlib
import locale
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch

# Those that decide how a run is stopped.
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)
)
STREAMS = (0, 1, 2)
# What no call may replace in `sys.modules`: the modules of these packages, and these, which each
# call is asked about.
OWN_PACKAGES = ("mha", "hypothesis", "pytest", "_pytest")
MAIN_MODULES = (
    "builtins",
    "math",
    "numpy",
    "os",
    "random",
    "sys",
    "torch",
    "torch.nn",
    "torch.nn.functional",
)
_MAIN = threading.main_thread().ident
# Python's own function for `signal.getsignal`, which makes an enumeration of its argument: that
# takes longer than all.
_handler_of: Callable[[int], Any] = importlib.import_module("_signal").getsignal


@dataclass(frozen=True)
class Part:
    """A part of the process, and how it is read and set.

    name: in a message, "" for what is put back silently.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]
    name: str = ""


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return None


def _enter_folder(folder: str | None) -> None:
    if folder is not None:
        os.chdir(folder)


def _handlers() -> tuple[Any, ...]:
    return tuple(map(_handler_of, SIGNALS))


def _set_handlers(handlers: tuple[Any, ...]) -> None:
    if threading.get_ident() != _MAIN:
        return
    for number, handler in zip(SIGNALS, handlers, strict=True):
        if handler is not None and _handler_of(number) is not handler:
            signal.signal(number, handler)


def _traced() -> tuple[Any, ...]:
    return sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()


def _set_traced(functions: tuple[Any, ...]) -> None:
    setters = sys.settrace, sys.setprofile, threading.settrace, threading.setprofile
    for set_function, function in zip(setters, functions, strict=True):
        set_function(function)


def _set_environment(variables: dict[Any, Any]) -> None:
    for name in {*os.environ._data, *variables}:  # type: ignore[attr-defined]  # of CPython
        decoded = os.environ.decodekey(name)
        if name in variables:
            os.environ[decoded] = os.environ.decodevalue(variables[name])
        else:
            del os.environ[decoded]


def _environment() -> dict[Any, Any]:
    """Return the variables as they are kept: encoding them takes as long as a small call."""
    return os.environ._data.copy()  # type: ignore[attr-defined,no-any-return]


def _set_modules(modules: tuple[Any, ...]) -> None:
    for name, module in zip(MAIN_MODULES, modules, strict=True):
        if module is not None:
            sys.modules[name] = module


def _set_path(folders: list[str]) -> None:
    sys.path[:] = folders


def _set_hooks(hooks: tuple[Any, ...]) -> None:
    sys.excepthook, sys.unraisablehook, threading.excepthook, sys.stderr, sys.stdin = hooks


def _hooks() -> tuple[Any, ...]:
    return sys.excepthook, sys.unraisablehook, threading.excepthook, sys.stderr, sys.stdin


def _collect(is_on: bool) -> None:
    if is_on:
        gc.enable()
    else:
        gc.disable()


def _default_device() -> tuple[Any, ...]:
    return (getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),)


def _set_default_device(contexts: tuple[Any, ...]) -> None:
    (context,) = contexts
    torch.set_default_device(None if context is None else context.device)


FIRST_LIMIT = sys.getrecursionlimit()


def _recursion_limit() -> int:
    """Return the recursion limit, at most the first one: compilers and Hypothesis raise it."""
    return min(sys.getrecursionlimit(), FIRST_LIMIT)


# What each call is asked about. Each is a tuple, compared by identity: what stands there may say
# that it equals anything.
QUICK = (
    Part(lambda: tuple(map(sys.modules.get, MAIN_MODULES)), _set_modules, "what is in sys.modules"),
    Part(_handlers, _set_handlers, "the handler of a signal"),
    Part(_traced, _set_traced, "the function that traces or profiles"),
    Part(_default_device, _set_default_device, "the default device"),
)
SLOW = (
    Part(_folder, _enter_folder, "the working directory"),
    Part(
        lambda: locale.setlocale(locale.LC_ALL),
        lambda name: locale.setlocale(locale.LC_ALL, name),
        "the locale",
    ),
    Part(_recursion_limit, sys.setrecursionlimit, "the recursion limit"),
    Part(gc.isenabled, _collect, "the garbage collection"),
    Part(_environment, _set_environment),
    Part(sys.path.copy, _set_path),
    Part(_hooks, _set_hooks),
)


def _file_of(descriptor: int) -> tuple[int, int] | None:
    """Return which file a descriptor is of; None if it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class _Streams:
    """Copies of the descriptors of standard input, output and error, which a call may close."""

    def __init__(self) -> None:
        self.copies: dict[int, int] = {}
        self.files: dict[int, tuple[int, int] | None] = {}

    def read(self) -> None:
        """Copy those that are other files than at the last look."""
        for descriptor in STREAMS:
            file = _file_of(descriptor)
            if self.files.get(descriptor, ()) == file:
                continue
            self.files[descriptor] = file
            if descriptor in self.copies:
                os.close(self.copies.pop(descriptor))
            if file is not None:
                self.copies[descriptor] = os.dup(descriptor)

    def put_back(self) -> bool:
        """Open again what was closed or replaced; return whether something was."""
        changed = [each for each in STREAMS if _file_of(each) != self.files[each]]
        for descriptor in changed:
            if descriptor in self.copies:
                os.dup2(self.copies[descriptor], descriptor)
            else:  # it was closed before
                os.close(descriptor)
        return bool(changed)


_streams = _Streams()


class _Modules:
    """The modules that the judge computes with, by name; more are added as they are loaded."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.count = 0

    def read(self) -> None:
        """Note what was loaded since the last look."""
        if len(sys.modules) == self.count:
            return
        self.count = len(sys.modules)
        for name, module in list(sys.modules.items()):
            if name in MAIN_MODULES or str(name).partition(".")[0] in OWN_PACKAGES:
                self.known.setdefault(name, module)

    def put_back(self) -> str:
        """Put back what was replaced or removed; return its names, "" if nothing was."""
        # A quick look at all of them first, since this is asked often.
        if all(map(is_, map(sys.modules.get, self.known), self.known.values())):
            return ""
        changed = []
        for name, module in self.known.items():
            if sys.modules.get(name) is not module:
                sys.modules[name] = module
                changed.append(name)
        return ", ".join(f"sys.modules[{name!r}]" for name in sorted(changed)[:3])


_modules = _Modules()


class Surroundings:
    """What was found in the process before a call, or before many.

    of_many: read what is `SLOW` to read too.
    of_import: leave alone what an import may change for good.
    """

    def __init__(self, *, of_many: bool = False, of_import: bool = False) -> None:
        self.quick: tuple[Part, ...] = QUICK
        self.slow: tuple[Part, ...] = SLOW if of_many else ()
        if of_import:
            self.quick, self.slow = self.quick[1:3], self.slow[:2]
        self.objects = _objects()
        self.modes = _modes()
        self.of_many = of_many
        self.values = [part.read() for part in self.slow]
        if of_many:
            _streams.read()
            _modules.read()

    def put_back(self) -> list[str]:
        """Put everything back; return in words what no ordinary call changes."""
        changed: list[str] = []
        if _modes() != self.modes:
            changed += _leave_modes(self.modes)
        if not all(map(is_, chain.from_iterable(_objects()), chain.from_iterable(self.objects))):
            for part, before in zip(QUICK, self.objects, strict=True):
                if part in self.quick and not all(map(is_, part.read(), before)):
                    changed += _written(part, before)
        if self.of_many:
            changed += self._changes_of_many()
        return changed

    def _changes_of_many(self) -> list[str]:
        changed = []
        for part, before in zip(self.slow, self.values, strict=True):
            if part.read() != before:
                changed += _written(part, before)
        if _streams.put_back():
            changed.append("closed or replaced a standard stream")
        names = _modules.put_back()
        if names:
            changed.append(f"replaced {names}")
        return changed


def _written(part: Part, before: Any) -> list[str]:
    """Put a part back; return what was changed, in words, unless it is put back silently."""
    with suppress(OSError, ValueError, TypeError):
        part.write(before)
    return [f"changed {part.name}"] if part.name else []


def _objects() -> tuple[tuple[Any, ...], ...]:
    """Return what each of `QUICK` reads."""
    return tuple(map(sys.modules.get, MAIN_MODULES)), _handlers(), _traced(), _default_device()


def _modes() -> tuple[int, int]:
    """Return how many modes of torch are entered, of functions and of dispatch."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def _leave_modes(before: tuple[int, int]) -> list[str]:
    """Leave the modes that were entered since, and return in words which.

    The one of the default device is a setting, which `torch_state` puts back.
    """
    functions, dispatches = before
    left, kept = list[Any](), list[Any]()
    while torch._C._len_torch_function_stack() > functions:
        mode = torch._C._pop_torch_function_stack()
        is_default = mode is getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        if is_default:
            kept.append(mode)
        else:
            left.append(mode)
    for mode in reversed(kept):
        torch._C._push_on_torch_function_stack(mode)
    while torch._C._len_torch_dispatch_stack() > dispatches:
        left.append(torch._C._pop_torch_dispatch_stack(None))
    return [f"left the mode {type(mode).__name__} entered" for mode in left]
