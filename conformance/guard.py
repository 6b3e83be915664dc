"""What the implementation under test does: whatever it raises is its own, and what it returns is a plain tensor."""

from __future__ import annotations

import re
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.conformance.violation import Refusal, Violation

# Ctrl-C, and what pytest stops a run or an item with.
NOT_ITS_OWN = (KeyboardInterrupt, pytest.fail.Exception, pytest.exit.Exception)


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Turn what the implementation raises into a `Refusal`; its warnings decide nothing, also where they are errors."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except NOT_ITS_OWN:
        raise
    except BaseException as error:
        raise Refusal(f"{what} raised {_told(error)}", error, what) from error


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Let Ctrl-C end what is done here, also where it comes while something swallows what is raised.

    As a garbage collection does, in which Hypothesis has a callback.
    """
    came, before = [], signal.getsignal(signal.SIGINT)

    def interrupted(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def _told(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {re.sub('0x[0-9a-f]{6,}', '0x...', lines[0][:300])}"  # two runs give one report


def require_plain(
    code: str, got: Any, dtypes: Sequence[torch.dtype], device: torch.device, shape: Sequence[int]
) -> None:
    """Raise a Violation unless this is a plain tensor of this shape and device, and of one of these dtypes."""
    if type(got) is not Tensor:
        told = f"{code} is of type {type(got).__name__}, but should be a tensor: a call should return "
        check = f"assert type({code}) is torch.Tensor, type({code})"
        raise Violation(f"{told}Output(output, weights)", (check,), family="SHP")
    dtype = got.dtype if got.dtype in dtypes else dtypes[0]
    wanted = {"shape": tuple(shape), "dtype": dtype, "device": device, "layout": torch.strided}
    for name, value in wanted.items():
        seen = getattr(got, name)
        if seen != value:
            shown = tuple(seen) if name == "shape" else seen
            check = f"assert {code}.{name} == {value!r}, {code}.{name}"
            raise Violation(f"{code}.{name} is {shown}, but should be {value}", (check,), family="SHP")
