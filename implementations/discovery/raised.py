"""What code of an author raised: where in the author's own file, and what it needs that is missing
here.
"""

from __future__ import annotations

import builtins
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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

    kind: its type. text: the type and the message, as one line. place: the last lines of the
    author's own code that it passed, as "mine.py, line 7 in forward: `x @ y`"; "" if it came from
    elsewhere, as where a call does not fit a signature. needs: what the code needs and is missing
    here, with what to do; "" if nothing is known to be.
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
        """Whether it is an error of the author's code, whatever it is given, and not of how it is
        called.

        What a line raises by `raise` is meant.
        """
        is_meant = (
            "`raise " in self.place or self.kind in OF_CALLS or not hasattr(builtins, self.kind)
        )
        return bool(self.place) and not is_meant and not self.is_of_none

    @property
    def is_of_none(self) -> bool:
        """Whether it is raised for None, which a call gives for a mask that it leaves out, and what
        is not known.
        """
        return self.kind in ("TypeError", "AttributeError") and "NoneType" in self.text

    def __str__(self) -> str:
        return f"{self.text} ({self.place})" if self.place else self.text


def place_of(error: BaseException, most: int = 3, *, code: bool = True) -> str:
    """Return the last lines of the author's own file that an exception passed, the outermost first;
    "" without any.

    most: the number of lines. code: whether the last one is shown. Lines of the author's file are
    those outside of this package, of torch, and of Python; among them, those of installed packages
    only if there are no others.
    """
    if isinstance(error, SyntaxError):  # its message says where
        return ""
    every = [*_frames(error)]
    own = [each for each in every if not {*Path(each.filename).parts} & {*INSTALLED}] or every
    last = [each for each in own if each.filename == own[-1].filename][-most:]
    if not last:
        return ""
    places = [
        f"line {each.lineno}" + ("" if each.name == "<module>" else f" in {each.name}")
        for each in last
    ]
    return ", ".join([Path(last[0].filename).name, *places]) + (_code_of(last[-1]) if code else "")


def _code_of(frame: traceback.FrameSummary) -> str:
    linecache.checkcache(frame.filename)  # the file may have been edited since
    line = frame.line or ""
    return f": `{line if len(line) <= LONGEST else f'{line[:LONGEST]}...'}`" if line else ""


def _frames(error: BaseException) -> Iterator[traceback.FrameSummary]:
    """Yield the frames that an exception passed since this package was left, without those of torch
    and Python.
    """
    passed = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in passed]
    last = max((number for number, module in enumerate(modules) if module == "mha"), default=-1)
    for (frame, line), module in zip(passed[last + 1 :], modules[last + 1 :], strict=True):
        file, installed = (
            frame.f_code.co_filename,
            {*Path(frame.f_code.co_filename).parts} & {*INSTALLED},
        )
        if (
            module not in OTHERS
            and (installed or not file.startswith(STANDARD))
            and file[:1] != "<"
        ):
            yield traceback.FrameSummary(file, line, frame.f_code.co_name, lookup_line=False)


def needs_of(error: BaseException) -> str:
    """Return what code needs that is missing here: a package, or a GPU; "" if the exception does
    not say so.

    >>> needs_of(ModuleNotFoundError("No module named 'triton'", name="triton"))
    'needs triton, which is not installed: pip install "mha-conformance[triton]"'
    """
    if missing := _missing_module(error):
        extra = EXTRAS.get(missing)
        how = f'is not installed: pip install "mha-conformance[{extra}]"' if extra else NOT_FOUND
        return f"needs {missing}, which {how}"
    if _is_of_cuda(error):
        return "needs CUDA, and there is none here; run it with --device cuda where there is one"
    return ""


def _missing_module(error: BaseException) -> str:
    """Return the package that an import did not find, perhaps one that another exception was raised
    for.
    """
    for each in _chain(error):
        name = str(each.name).partition(".")[0] if isinstance(each, ModuleNotFoundError) else ""
        if name and sys.modules.get(name) is None:
            return name
    return ""


def _chain(error: BaseException) -> list[BaseException]:
    """Return an exception, and those that it was raised for."""
    chain: list[BaseException] = []
    last: BaseException | None = error
    while last is not None and all(
        last is not each for each in chain
    ):  # one may be raised from itself
        chain.append(last)
        last = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
    return chain


def _is_of_cuda(error: BaseException) -> bool:
    """Return whether an exception is raised for want of a GPU, by its message or, without one, its
    line.
    """
    if torch.cuda.is_available() or not isinstance(error, CUDA_ERRORS):
        return False
    frames = [*_frames(error)]
    line = frames[-1].line if frames and not one_line(error) else ""
    return bool(OF_CUDA.search(f"{one_line(error)} {line}"))


def main_one(tries: list[list[Raised]]) -> Raised:
    """Return the exception that says most: of several tries, each with what its calls raised, the
    one of most of them.

    What is missing here comes first, then errors of the code itself, then what the first call
    raised.
    """
    every = [each for raised in tries for each in raised]

    def weight(each: Raised) -> tuple[bool, bool, int]:
        count = sum(any(_is_same(each, other) for other in raised) for raised in tries)
        return bool(each.needs), each.is_of_code, count

    return max(every, key=weight)


def _is_same(one: Raised, other: Raised) -> bool:
    """Return whether two exceptions are the same, but for what a message says of shapes and dtypes."""
    return (one.kind, one.place or one.text) == (other.kind, other.place or other.text)
