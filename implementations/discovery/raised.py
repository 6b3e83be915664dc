"""What code of an author raised: where in the author's own file, and what it lacks here."""

from __future__ import annotations

import builtins
import itertools
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from mha.implementations.discovery.errors import one_line

# Packages whose frames say nothing about the author's code.
OTHERS = ("mha", "torch", "einops", "importlib", "_frozen_importlib", "_frozen_importlib_external")
INSTALLED = ("site-packages", "dist-packages")
STANDARD = sysconfig.get_paths()["stdlib"]
# Messages of code that runs on a GPU alone, where there is none: of torch, of Triton, and of
# asserts.
OF_CUDA = re.compile(
    r"(?<![a-z])(cuda|gpus?|nvidia)(?![a-z])|active drivers|cpu tensor\?|accelerator device", re.I
)
# What is raised for want of a GPU; an AssertionError may have no message but its line.
CUDA_ERRORS = (RuntimeError, AssertionError, ValueError, NotImplementedError, OSError, TypeError)
# The extra of this package that brings a module which implementations import.
EXTRAS = {"triton": "triton"}
# What a call raises whose inputs have another shape or layout than its code expects.
OF_CALLS = {"RuntimeError", "ValueError", "IndexError", "AssertionError", "NotImplementedError"}
NOT_FOUND = "cannot be imported here; install it, or add the folder that has it to PYTHONPATH"
LONGEST = 80


@dataclass(frozen=True)
class Raised:
    """An exception of an author's code.

    kind: its type.
    text: the type and the message, as one line.
    place: the last lines of the author's own code that it passed, as "mine.py, line 7 in forward:
        `x @ y`"; "" if it came from elsewhere, as where a call does not fit a signature.
    needs: what the code needs and is missing here, with what to do; "" if nothing is known to be.
    """

    kind: str
    text: str
    place: str
    needs: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Return what is known about an exception.

        >>> Raised.of(ValueError("no rope:\\n  odd width")).text
        'ValueError: no rope: odd width'
        """
        text = ": ".join(filter(None, (type(error).__name__, one_line(error))))
        return cls(type(error).__name__, text, place_of(error), needs_of(error))

    @property
    def is_of_code(self) -> bool:
        """Whether it is an error of the author's code, whatever that is given.

        What a line raises by `raise` is meant, and so is what says that an input does not fit.
        """
        if not self.place or self.is_of_none:
            return False
        is_meant = "`raise " in self.place or not hasattr(builtins, self.kind)
        return not is_meant and self.kind not in OF_CALLS

    @property
    def is_of_none(self) -> bool:
        """Whether it is raised for None, which stands for no mask, and for what is not known."""
        return self.kind in ("TypeError", "AttributeError") and "NoneType" in self.text

    def __str__(self) -> str:
        return f"{self.text} ({self.place})" if self.place else self.text


def place_of(error: BaseException, most: int = 3, *, code: bool = True) -> str:
    """Return the last lines of the author's own file that an exception passed, outermost first.

    They are lines outside of this package, of torch, and of Python, and of installed packages only
    if there are no others. Without any, it is "".

    most: the number of lines.
    code: whether the last one is shown.
    """
    if isinstance(error, SyntaxError):  # its message says where
        return ""
    every = [*_frames(error)]
    own = [each for each in every if not _is_installed(each.filename)] or every
    if not own:
        return ""
    file = own[-1].filename
    last = [each for each in own if each.filename == file][-most:]
    places = [Path(file).name]
    for each in last:
        function = "" if each.name == "<module>" else f" in {each.name}"
        places.append(f"line {each.lineno}{function}")
    shown = _code_of(last[-1]) if code else ""
    return ", ".join(places) + shown


def _is_installed(file: str) -> bool:
    """Return whether a file is of an installed package."""
    return not {*Path(file).parts}.isdisjoint(INSTALLED)


def _code_of(frame: traceback.FrameSummary) -> str:
    """Return the line of a frame as it follows its number, or "" without one."""
    linecache.checkcache(frame.filename)  # the file may have been edited since
    line = frame.line or ""
    if len(line) > LONGEST:
        line = f"{line[:LONGEST]}..."
    return f": `{line}`" if line else ""


def _frames(error: BaseException) -> Iterator[traceback.FrameSummary]:
    """Yield the frames of others that an exception passed since this package was left."""
    passed: list[tuple[FrameType, int, str]] = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        package, _, _ = str(frame.f_globals.get("__name__", "")).partition(".")
        if package == "mha":
            passed.clear()
        else:
            passed.append((frame, line, package))
    for frame, line, package in passed:
        file = frame.f_code.co_filename
        is_of_python = file.startswith(STANDARD) and not _is_installed(file)
        has_a_file = file[:1] != "<"
        if package not in OTHERS and has_a_file and not is_of_python:
            yield traceback.FrameSummary(file, line, frame.f_code.co_name, lookup_line=False)


def needs_of(error: BaseException) -> str:
    """Return what code needs that is missing here: a package, or a GPU; "" if that is not known.

    >>> needs_of(ModuleNotFoundError("No module named 'triton'", name="triton"))
    'needs triton, which is not installed: pip install "mha-conformance[triton]"'
    """
    missing = _missing_module(error)
    if missing in EXTRAS:
        install = f'pip install "mha-conformance[{EXTRAS[missing]}]"'
        return f"needs {missing}, which is not installed: {install}"
    if missing:
        return f"needs {missing}, which {NOT_FOUND}"
    if _is_of_cuda(error):
        return "needs CUDA, and there is none here; run it with --device cuda where there is one"
    return ""


def _missing_module(error: BaseException) -> str:
    """Return the package that an import did not find; "" if that is not what was raised.

    The import may be what another exception was raised for.
    """
    for each in _chain(error):
        if not isinstance(each, ModuleNotFoundError):
            continue
        name, _, _ = str(each.name).partition(".")
        if name and sys.modules.get(name) is None:
            return name
    return ""


def _chain(error: BaseException) -> list[BaseException]:
    """Return an exception, and those that it was raised for."""
    chain: list[BaseException] = []
    last: BaseException | None = error
    while last is not None:
        if any(last is each for each in chain):  # one may be raised from itself
            break
        chain.append(last)
        if last.__cause__ is None and last.__suppress_context__:
            break
        last = last.__cause__ or last.__context__
    return chain


def _is_of_cuda(error: BaseException) -> bool:
    """Return whether an exception is raised for want of a GPU, by its message or its line."""
    if torch.cuda.is_available() or not isinstance(error, CUDA_ERRORS):
        return False
    message = one_line(error)
    frames = [*_frames(error)]
    line = frames[-1].line if frames and not message else ""
    return bool(OF_CUDA.search(f"{message} {line}"))


def main_one(tries: list[list[Raised]]) -> Raised:
    """Return the exception that says most, of several tries.

    What is missing here comes first, then errors of the code itself, then what most tries raised,
    then what the first call raised.

    tries: what the calls of each one raised.
    """

    def weight(each: Raised) -> tuple[bool, bool, int]:
        count = 0
        for raised in tries:
            count += any(_is_same(each, other) for other in raised)
        return bool(each.needs), each.is_of_code, count

    return max(itertools.chain.from_iterable(tries), key=weight)


def _is_same(one: Raised, other: Raised) -> bool:
    """Return whether two exceptions are the same, whatever shapes and dtypes a message names."""
    return (one.kind, one.place or one.text) == (other.kind, other.place or other.text)
