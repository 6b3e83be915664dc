"""Whose an exception is: the judge's own, or that of judged code, which may raise the same types.

An exception is the judge's own if it passed no frame of other code since the judge was left. A frame is the judge's by
the identity of its code, which no name can pretend; frames of torch and of Python may be between.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

from mha.implementations.originals import codes

# Where adapters and sessions raise what steers the judge, within a call of judged code.
RAISERS = (
    "mha.conformance.harness.integrity",
    "mha.conformance.harness.isolation",
    "mha.conformance.harness.session",
    "mha.conformance.sharding",
    "mha.implementations.adapters",
)
# Of this package: what judges. The rest is what is judged.
JUDGING = ("mha.spec", "mha.conformance", "mha.implementations.adapters", "mha.implementations.pristine")
_paths = sysconfig.get_paths()
_INSTALLED = (_paths["purelib"], _paths["platlib"])
_BETWEEN = (str(Path(torch.__file__).parent), _paths["stdlib"], "<frozen ")
_traceback_of: Callable[[BaseException], TracebackType | None] = vars(BaseException)["__traceback__"].__get__


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames that an exception has passed, the innermost last."""
    at = _traceback_of(error)
    while at is not None:
        yield at.tb_frame
        at = at.tb_next


def is_of_judge(error: BaseException, raisers: Collection[str] = JUDGING, *, beside: str = "") -> bool:
    """Return whether an exception is the judge's own, and was raised by one of its modules.

    raisers: these modules, by the beginnings of their names. beside: a file whose code belongs to the judge too.
    """
    passed = [frame.f_code for frame in frames_of(error)]
    if not passed:
        return False
    own = [_module_of(code) for code in passed]
    if not all(module or _may_be_between(code, beside) for module, code in zip(own, passed, strict=True)):
        return False
    return own[-1].startswith(tuple(raisers)) if own[-1] else passed[-1].co_filename == beside


def passed_judged_code(error: BaseException, *, beside: str = "") -> bool:
    """Return whether an exception passed a frame that is neither the judge's, nor of torch or Python."""
    return any(not (_module_of(f.f_code) or _may_be_between(f.f_code, beside)) for f in frames_of(error))


def _module_of(code: CodeType) -> str:
    """Return the module of the judge that a code object is of; "" for another."""
    module = codes().get(id(code), "")
    return module if module.startswith(JUDGING) else ""


def _may_be_between(code: CodeType, beside: str) -> bool:
    file = code.co_filename
    if beside and file == beside:
        return True
    return file.startswith(_BETWEEN) and not (file.startswith(_INSTALLED) and not file.startswith(_BETWEEN[0]))
