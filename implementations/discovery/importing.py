"""Importing the code of implementations: a module by its name, or a file, and an object in it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from threading import Timer, current_thread, main_thread
from types import FrameType, ModuleType
from typing import NoReturn

from torch import nn

from mha.implementations.discovery.errors import (
    INTERRUPTED,
    ImplementationError,
    did_you_mean,
)
from mha.implementations.discovery.loaded import variables_of
from mha.implementations.discovery.originals import changes, new_changes
from mha.implementations.discovery.raised import Raised
from mha.implementations.discovery.watched import OWN
from mha.implementations.process.clock import CLOCK
from mha.implementations.process.surroundings import Surroundings

# What loads the modules that judge, before any code that is judged is imported, and could change
# them as they load.
LOADERS: list[Callable[[], object]] = []


@contextmanager
def judge_left_alone() -> Iterator[None]:
    """Undo what imported code, or a trial of it, replaces of Python, and of what the judge uses.

    Packages replace functions of others when they are imported, and what is theirs works without;
    for torch, see `pristine`.

    Raises ImplementationError, at the end of the block, where that is a part of this package.
    """
    for load in LOADERS:
        load()
    # The imported code may replace the names of these.
    look = new_changes
    found = changes()
    around = Surroundings(of_many=True, of_import=True)
    try:
        yield
    finally:
        replaced = look(found)
        for change in replaced.values():
            change.undo()
        others = around.put_back()
    own = [name for name in replaced if name.partition(".")[0] == OWN]
    for each in others:
        if f"sys.modules['{OWN}." in each:
            own.append(each.removeprefix("replaced "))
    if own:
        raise ImplementationError(
            f"it replaces {', '.join(sorted(own)[:3])}, for everybody, so nothing can be judged"
        )


# In seconds: after the first, what still loads is named on standard error; after the second, it
# counts as broken.
SLOW, PATIENCE = 20.0, 300.0
# An import may take so many times as long as a call, where these are limited: by default a bit
# longer than `PATIENCE`.
IMPORTS = 6.0


@contextmanager
def default_warnings() -> Iterator[None]:
    """Let imported code warn, even in a run that turns warnings into errors, and note its time."""
    with CLOCK.running(times_as_long=IMPORTS), warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Make the modules in a folder importable, as `python` does for a script."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # the imported code may have removed it
            sys.path.remove(str(folder))


def load_module(name: str) -> ModuleType:
    """Import a module; raises ImplementationError for one that cannot be imported."""
    try:
        with judge_left_alone(), default_warnings(), importable(Path.cwd()):
            return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may raise anything while it is imported
        shown = described(error)
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            shown = Raised.of(error).text  # the module itself is missing, and no place says more
        raise ImplementationError(f"the module {name!r} cannot be imported: {shown}") from error


def load_file(path: Path) -> ModuleType:
    """Run a file as a module; raises ImplementationError for one that cannot be run."""
    if not path.is_file():
        raise ImplementationError(f"there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImplementationError(f"{str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        sys.modules.setdefault(path.stem, module)
        with judge_left_alone(), default_warnings(), importable(path.resolve().parent):
            spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's file may raise anything
        if sys.modules.get(path.stem) is module:
            del sys.modules[path.stem]
        message = f"{str(path)!r} cannot be run: {described(error)}"
        if "relative import" in str(error):
            message += "; name it as part of its package, package.module:NAME"
        raise ImplementationError(message) from error
    return module


def member_of(module: ModuleType, name: str, target: str) -> object:
    """Return an object of a module; raises ImplementationError, with the target, without one."""
    held = variables_of(module)
    if name in held:
        return held[name]
    try:
        return getattr(module, name)
    except AttributeError:
        public = [each for each in held if not each.startswith("_")]
        hint = did_you_mean(name, public)
        raise ImplementationError(
            f"{target!r} does not exist{hint} (the module defines {', '.join(public) or 'nothing'})"
        ) from None
    except (Exception, SystemExit) as error:  # of what is imported when it is asked for
        raise ImplementationError(f"{target!r} cannot be imported: {described(error)}") from error


def entry_point_of(name: str, registered: Sequence[EntryPoint]) -> EntryPoint:
    """Return the entry point of a registered name."""
    points = [point for point in registered if point.name == name]
    if not points:
        known = sorted({point.name for point in registered})
        hint = did_you_mean(name, known)
        raise ImplementationError(
            f"no implementation is registered as {name!r}{hint} (registered:"
            f" {', '.join(known) or 'none'}; give one of these names, package.module:object, or"
            " path/to/file.py:object)"
        )
    targets = sorted(point.value for point in points)
    if len(set(targets)) > 1:
        values = " and ".join(targets)
        raise ImplementationError(
            f"the name {name!r} is registered twice, for {values}; give one of these instead"
        )
    return points[0]


def classes_of(module: ModuleType) -> list[str]:
    """Return the names of the `torch.nn.Module` classes that a file defines."""
    names = []
    for name, value in variables_of(module).items():
        if not issubclass(type(value), type):
            continue
        if issubclass(value, nn.Module) and value.__module__ == module.__name__:
            names.append(name)
    return names


def described(error: BaseException) -> str:
    """Return in one line what an exception of a file says: what is missing, its message, where."""
    raised = Raised.of(error)
    return f"it {raised.needs} ({raised})" if raised.needs else str(raised)


@contextmanager
def contained(what: str) -> Iterator[None]:
    """Let the block load code of others; what: that code, as users know it.

    Its `os._exit` raises SystemExit. A KeyboardInterrupt that nobody has caused is an
    ImplementationError, and so is a block that takes too long, in the main thread.
    """
    with _exit_refused(), _said_if_slow(what), _own_interrupts_only():
        yield


@contextmanager
def _exit_refused() -> Iterator[None]:
    leave, own = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != own:  # a fork of the process
            leave(status)
        raise SystemExit(status)

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave


@contextmanager
def _said_if_slow(what: str) -> Iterator[None]:
    line = f"mha: {what} has been loading for {SLOW:g} s"
    timer = Timer(SLOW, print, (line,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _own_interrupts_only() -> Iterator[None]:
    """Let through what Ctrl-C raises, but no interrupt of the code; end it after `PATIENCE`."""
    previous = signal.getsignal(signal.SIGINT)
    is_ignored = previous is signal.SIG_IGN  # as in the background of a shell
    is_usual = is_ignored or previous is signal.default_int_handler
    if not is_usual or current_thread() is not main_thread():
        yield
        return
    interrupts, late = list[int](), list[bool]()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if late:
            raise ImplementationError(f"it took longer than {PATIENCE:g} s to load")
        if is_ignored:
            return
        interrupts.append(number)
        raise KeyboardInterrupt

    def expire() -> None:
        late.append(True)
        signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)

    timer = Timer(PATIENCE, expire)
    timer.daemon = True
    signal.signal(signal.SIGINT, interrupt)
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        if interrupts:
            raise
        raise ImplementationError(INTERRUPTED) from None
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, previous)
