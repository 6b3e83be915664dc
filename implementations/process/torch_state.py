"""The functions and settings of torch: as they were at first, and as they are found."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

# Torch itself replaces these: in `torch.compile`, and when the default dtype changes.
REPLACED_BY_TORCH = ("manual_seed", "Storage")
# The modules of what torch has under its own names; anything else was put there before this module
# was imported.
OF_TORCH = ("torch", "typing", "typing_extensions", "collections", "builtins", "None")
MISSING = object()
# What stands where, by its dotted name: another function or method than torch's, or MISSING.
Replacements = dict[str, object]


def _is_of_torch(value: object) -> bool:
    return str(getattr(value, "__module__", None)).partition(".")[0] in OF_TORCH


def _original(name: str, value: object, below: object) -> object:
    """Return what torch has under a name; below: where it has its functions in C."""
    return value if _is_of_torch(value) else getattr(below, name, value)


FUNCTIONS = {
    name: _original(name, value, torch._C._VariableFunctions)
    for name, value in vars(torch).items()
    if callable(value) and name not in REPLACED_BY_TORCH
}
METHODS = {
    name: value
    for name, value in vars(torch.Tensor).items()
    if _is_of_torch(value) or not hasattr(torch._C.TensorBase, name)
}
_INHERITED = set(dir(torch.Tensor.__base__))


def replacements() -> Replacements:
    """Return what stands in place of torch's functions, and of the methods of its tensors.

    Additions under new names are not replacements. Modules such as `torch.nn.functional` are not
    looked at.

    >>> before, torch.relu = torch.relu, abs
    >>> replacements()
    {'torch.relu': <built-in function abs>}
    >>> torch.relu = before
    """
    found: Replacements = {}
    functions, methods = vars(torch), vars(torch.Tensor)
    # A quick look at all of them first, since this is asked often.
    if not FUNCTIONS.items() <= functions.items():
        for name, first in FUNCTIONS.items():
            now = functions.get(name, MISSING)
            if now is not first:
                found[f"torch.{name}"] = now
    # Python's own `__slotnames__` is among the others, once a tensor was copied.
    inherited = (methods.keys() - METHODS.keys()) & _INHERITED
    if inherited or not METHODS.items() <= methods.items():
        for name in METHODS.keys() | inherited:
            now = methods.get(name, MISSING)
            if now is not METHODS.get(name, MISSING):
                found[f"torch.Tensor.{name}"] = now
    return found


def replace_by(wanted: Replacements) -> list[str]:
    """Make these the replacements, and undo all others; return the names that had another value."""
    found, changed = replacements(), []
    for name in found.keys() | wanted.keys():
        owner, _, attribute = name.rpartition(".")
        target: Any = torch
        originals: Mapping[str, Any] = FUNCTIONS
        if owner != "torch":
            target, originals = torch.Tensor, METHODS
        value = wanted.get(name, originals.get(attribute, MISSING))
        if found.get(name, originals.get(attribute, MISSING)) is value:
            continue
        changed.append(name)
        if value is MISSING:
            delattr(target, attribute)
        else:
            setattr(target, attribute, value)
    return sorted(changed)


class Setting(NamedTuple):
    """A part of the global state, and how it is read and set.

    shown: whether its value fits in a message.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]
    shown: bool = True


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device == torch.device("cpu") else device)


def _subnormals() -> str:
    product = torch.full((1,), 1e-39, dtype=torch.float32, device="cpu") * 1
    return "kept" if product.item() else "flushed to 0"


def _sdpa_backends() -> tuple[bool, bool, bool]:
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled()


def _set_sdpa_backends(enabled: tuple[bool, bool, bool]) -> None:
    flash, math, mem_efficient = enabled
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_math_sdp(math)
    torch.backends.cuda.enable_mem_efficient_sdp(mem_efficient)


SETTINGS = {
    "the default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
    "the default device": Setting(torch.get_default_device, _set_default_device),
    "the gradient mode": Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's random state": Setting(
        lambda: torch.get_rng_state().numpy().tobytes(),
        lambda state: torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
        shown=False,
    ),
    "Python's random state": Setting(random.getstate, random.setstate, shown=False),
    "the number of threads": Setting(torch.get_num_threads, torch.set_num_threads),
    "the handling of subnormal numbers": Setting(
        _subnormals, lambda handling: torch.set_flush_denormal(handling != "kept")
    ),
    "the deterministic flag": Setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    "the precision of float32 products": Setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "anomaly detection": Setting(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "the SDPA backends": Setting(_sdpa_backends, _set_sdpa_backends),
}


def settings() -> dict[str, Any]:
    """Return the value of each setting.

    >>> settings()["the default dtype"]
    torch.float32
    """
    return {name: setting.read() for name, setting in SETTINGS.items()}


def set_to(values: Mapping[str, Any]) -> None:
    """Set what has another value."""
    for name, value in values.items():
        if SETTINGS[name].read() != value:
            SETTINGS[name].write(value)


@contextmanager
def preserved() -> Iterator[None]:
    """Put the settings, and the filters of warnings, back at the end of the block."""
    before = settings()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        set_to(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute on this many threads.

    One infers and judges: problems are small, and bits may not depend on the number of cores.
    """
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
