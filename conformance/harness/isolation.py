"""The border between judge and implementation, for what it raises and what it returns."""

from __future__ import annotations

import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mha.conformance.harness.errors import AdapterError, CallRaised, Discard, GpuLost, Violation
from mha.conformance.harness.plain import all_plain, clean
from mha.conformance.harness.provenance import is_of_judge, passed_judged_code
from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.discovery.raised import place_of
from mha.implementations.process.pristine import as_found
from mha.spec import Weights

# What stops a run beside Ctrl-C, and is no exception of the implementation; the pytest plugin adds
# its time limit.
STOPS: list[Callable[[BaseException], bool]] = []
# The interrupts since the outermost block that heeds them was entered.
INTERRUPTS: list[int] = []
NO_HYPOTHESIS = nullcontext()
# How the GPU is waited for; tests that have none put other functions here.
GPU = SimpleNamespace(is_initialized=torch.cuda.is_initialized, synchronize=torch.cuda.synchronize)
# What steers the judge. Judged code may raise the same types: then they are exceptions like any
# other.
STEERING = (Violation, AdapterError, Discard, GpuLost, ImplementationError)


@contextmanager
def attributed(what: str) -> Iterator[None]:
    """Turn every exception of the implementation into a `CallRaised`.

    One of its adapter becomes an `AdapterError`, and one after which the GPU is lost a `GpuLost`,
    which nothing takes for a refusal. What a call within the block has already raised stays as it
    is.

    what: the step that raises it.
    """
    try:
        with as_found(), outside_of_hypothesis():
            yield
        _wait_for_gpu()
    except BaseException as error:
        if _stops(error):
            raise
        kind = type(error)
        if issubclass(kind, STEERING) and is_of_judge(error):
            if not isinstance(error, ImplementationError):
                raise
            first_line, *_ = str(error).splitlines() or [""]
            message = f"the adapter, not the class, failed in {what}: {first_line}"
            raise AdapterError(message, error) from error
        if gpu_is_lost():
            raise GpuLost(f"{what} raised {_first_line(error)}") from error
        raise CallRaised(f"{what} raised {_described(error)}", error, what) from error
    finally:
        clean()


@contextmanager
def of_property(function: Callable[..., object]) -> Iterator[None]:
    """Turn what judged code raises outside of its calls into a `CallRaised`.

    An example is an attribute of it that is read. Only what would steer the judge is turned;
    anything else is a harness error.

    function: that of the property, whose own exceptions are left as they are.
    """
    file = function.__code__.co_filename
    try:
        yield
    except BaseException as error:
        if not _steers(type(error)) or _stops(error) or not passed_judged_code(error, beside=file):
            raise
        raise CallRaised(f"the implementation raised {_described(error)}", error) from error


def _steers(kind: type[BaseException]) -> bool:
    """Return whether exceptions of a type steer the judge or Hypothesis, or end a process."""
    if issubclass(kind, STEERING) or not issubclass(kind, Exception):
        return True
    return any(base.__module__.partition(".")[0] == "hypothesis" for base in kind.__mro__)


@contextmanager
def contained() -> Iterator[None]:
    """Drop whatever the block raises, except what stops the run."""
    try:
        yield
    except BaseException as error:
        if _stops(error):
            raise


def _stops(error: BaseException) -> bool:
    """Return whether an exception stops the run: Ctrl-C, but not one that judged code raises."""
    if any(stops(error) for stops in STOPS):
        return True
    if not issubclass(type(error), KeyboardInterrupt):
        return False
    noted = signal.getsignal(signal.SIGINT) in (_interrupted, signal.SIG_IGN, signal.SIG_DFL)
    return bool(INTERRUPTS) or not noted


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Do as `attributed`, and ignore the implementation's warnings, even those that are errors."""
    with attributed(what), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outside_of_hypothesis() -> AbstractContextManager[None]:
    """Let a block run as if Hypothesis ran nothing: what it is told there must not count for the
    search.
    """
    context = getattr(sys.modules.get("hypothesis.control"), "_current_build_context", None)
    if context is None or context.value is None:
        return NO_HYPOTHESIS
    return context.with_value(None)  # type: ignore[no-any-return]  # of a private class


def gpu_is_lost() -> bool:
    """Return whether this process can no longer use its GPU, as after a kernel's wild read."""
    try:
        _wait_for_gpu()
    except RuntimeError:
        return True
    return False


def _wait_for_gpu() -> None:
    """Wait for the kernels that were started, so that an error of one is not raised later."""
    if GPU.is_initialized():
        GPU.synchronize()


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Let Ctrl-C end the block even if it comes while something swallows exceptions.

    A garbage collection does so, and Hypothesis has a callback in it. Blocks may be nested.
    """
    previous = signal.getsignal(signal.SIGINT)
    outermost = (
        previous is signal.default_int_handler
        and threading.current_thread() is threading.main_thread()
    )
    if outermost:
        signal.signal(signal.SIGINT, _interrupted)
    try:
        yield
        if INTERRUPTS:
            raise KeyboardInterrupt
    finally:
        if outermost:
            signal.signal(signal.SIGINT, previous)
            INTERRUPTS.clear()


def _interrupted(number: int, frame: FrameType | None) -> None:
    INTERRUPTS.append(number)
    raise KeyboardInterrupt


def require_plain(
    code: str,
    tensor: Any,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    shape: Sequence[int],
) -> None:
    """Raise a Violation unless this is a plain tensor of this shape and device, and of a dtype."""
    if type(tensor) is not Tensor:
        message = (
            f"{code} is of type {type(tensor).__name__}, but should be a tensor: a call should"
            " return Output(output, weights)"
        )
        assertion = f"assert type({code}) is torch.Tensor, type({code})"
        raise Violation(message, (assertion,), family="SHP")
    dtype = dtypes[0]
    if tensor.dtype in dtypes:
        dtype = tensor.dtype
    expected = {"shape": tuple(shape), "dtype": dtype, "device": device, "layout": torch.strided}
    found = {name: getattr(tensor, name) for name in expected}
    found["shape"] = tuple(found["shape"])  # `torch.Size` would be shown by its name
    for name, value in expected.items():
        if found[name] != value:
            message = f"{code}.{name} is {found[name]}, but should be {value}"
            assertion = f"assert {code}.{name} == {value!r}, {code}.{name}"
            raise Violation(message, (assertion,), family="SHP")


def require_gradients(code: str, gradients: Mapping[str, Any], weights: Weights) -> None:
    """Raise a Violation unless there is a gradient for each of the weights, of its shape."""
    for name, tensor in weights.named():
        gradient, shape = gradients.get(name), tuple(tensor.shape)
        if gradient is None or not all_plain([gradient]) or gradient.shape != shape:
            assertion = f"assert {code}[{name!r}].shape == {shape}"
            raise Violation(f"{code} has no {name!r} of shape {shape}", (assertion,), family="GRD")


def _first_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message.

    It has no addresses, so that reports repeat.
    """
    lines = _text(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {re.sub('0x[0-9a-f]{6,}', '0x...', lines[0][:300])}"


def _text(error: BaseException) -> str:
    """Return the message of an exception; "" if it has none that can be made."""
    with contained():
        return str(error)
    return ""


def _described(error: BaseException) -> str:
    """Return the type of an exception, the first line of its message, and where it arose."""
    place = ""
    with contained():
        place = place_of(error, most=2, code=False)
    if not place:
        return _first_line(error)
    return f"{_first_line(error)} ({place})"
