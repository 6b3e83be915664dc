"""What the implementation under test does: whatever it raises is its own, and what it returns is a plain tensor."""

from __future__ import annotations

import re
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from mha.conformance.harness.errors import CallRaised, Violation
from mha.spec import Weights

# What ends a run from outside, and is never the implementation's: Ctrl-C; the pytest plugin adds pytest's own.
STOPS: list[type[BaseException]] = [KeyboardInterrupt]


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Turn what the implementation raises into a `Refusal`; its warnings decide nothing, also where they are errors."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except BaseException as error:
        if isinstance(error, tuple(STOPS)):
            raise
        raise CallRaised(f"{what} raised {_told(error)}", error, what) from error


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


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute on so many threads: one to judge, as problems are small and the bits must not depend on the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


def require_gradients(code: str, found: Mapping[str, Any], weights: Weights) -> None:
    """Raise a Violation unless there is a gradient for each of the weights, of its shape."""
    for name, tensor in weights.named():
        gradient, shape = found.get(name), tuple(tensor.shape)
        if not isinstance(gradient, Tensor) or gradient.shape != shape:
            check = f"assert {code}[{name!r}].shape == {shape}"
            raise Violation(f"{code} has no {name!r} of shape {shape}", (check,), family="GRD")
