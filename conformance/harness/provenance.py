"""Whose an exception is: the judge's own, or that of judged code, which may raise the same types.

An exception is the judge's own if it passed no frame of other code since the judge was left. A
frame is the judge's by the identity of its code, which no name can pretend; frames of torch and of
Python may be between.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any

import torch

from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.discovery.originals import codes

# Where adapters and sessions raise what steers the judge, within a call of judged code.
RAISERS = (
    "mha.conformance.harness.differentiation",
    "mha.conformance.harness.integrity",
    "mha.conformance.harness.isolation",
    "mha.conformance.harness.returned",
    "mha.conformance.harness.session",
    "mha.conformance.sharding",
    "mha.implementations.adapters",
)
# Of this package: what judges. The rest is what is judged.
JUDGING = (
    "mha.spec",
    "mha.conformance",
    "mha.implementations.adapters",
    "mha.implementations.process.pristine",
)
_paths = sysconfig.get_paths()
_INSTALLED = (_paths["purelib"], _paths["platlib"])
_TORCH, _PYTHON = str(Path(torch.__file__).parent) + os.sep, (_paths["stdlib"] + os.sep, "<frozen ")
_traceback: Any = vars(BaseException)["__traceback__"]
_traceback_of: Callable[[BaseException], TracebackType | None] = _traceback.__get__
# The function `call` that the author of an adapter has given, of what is judged now.
_calls: list[CodeType] = []


def note_adapter(call: object) -> None:
    """Note the function that an adapter was given to make calls.

    It may say that a call cannot be expressed.
    """
    _calls[:] = [call.__code__] if isinstance(call, FunctionType) else []


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames that an exception has passed, the innermost last."""
    at = _traceback_of(error)
    while at is not None:
        yield at.tb_frame
        at = at.tb_next


def is_of_judge(error: BaseException) -> bool:
    """Return whether an exception of a call of judged code is the judge's own.

    One of the `RAISERS` raised it, or the function of an adapter.
    """
    passed = [frame.f_code for frame in frames_of(error)]
    if not passed:
        return False
    *before, last = passed
    if any(_is_of_others(code) for code in before):
        return False
    is_call = any(code is last for code in _calls)
    if is_call and issubclass(type(error), ImplementationError):
        return True
    return not _is_of_others(last) and _module_of(last).startswith(RAISERS)


def passed_judged_code(error: BaseException, *, beside: str = "") -> bool:
    """Return whether an exception passed a frame of judged code.

    That is neither the judge's, nor of a file beside it, nor of torch or Python.
    """
    return any(_is_of_others(frame.f_code, beside) for frame in frames_of(error))


def _module_of(code: CodeType) -> str:
    """Return the module of the judge that a code object is of; "" for another."""
    module = codes().get(id(code), "")
    return module if module.startswith(JUDGING) else ""


def _is_of_others(code: CodeType, beside: str = "") -> bool:
    """Return whether code is not the judge's, nor of a file beside it, nor of torch or Python."""
    file = code.co_filename
    if _module_of(code) or (beside and file == beside) or file.startswith(_TORCH):
        return False
    return file.startswith(_INSTALLED) or not file.startswith(_PYTHON)
