"""What torch and Python hold for a whole process, which a call must leave as it was."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# A number below the least normal one of float32.
SUBNORMAL = 1e-40


class Setting(NamedTuple):
    """How a setting is read and written; equal values are the same setting."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _random_state() -> bytes:
    return bytes(torch.get_rng_state().numpy())


def _set_random_state(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _numpy_state() -> tuple[Any, ...] | None:
    """Return NumPy's global random state; None until that is loaded."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return None
    name, numbers, *others = numpy_random.get_state()
    return name, bytes(numbers), *others


def _set_numpy_state(state: tuple[Any, ...]) -> None:
    name, numbers, *others = state
    words = torch.frombuffer(bytearray(numbers), dtype=torch.uint8).numpy().view("uint32")
    sys.modules["numpy.random"].set_state((name, words, *others))


def _flushes_subnormals() -> bool:
    number: Tensor = torch.full((), SUBNORMAL, dtype=torch.float32, device="cpu")
    return not bool(number * 1)


SETTINGS = {
    "the default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
    "the gradient mode": Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's random state": Setting(_random_state, _set_random_state),
    "Python's random state": Setting(random.getstate, random.setstate),
    "NumPy's random state": Setting(_numpy_state, _set_numpy_state),
    "the number of threads": Setting(torch.get_num_threads, torch.set_num_threads),
    "the handling of subnormal numbers": Setting(_flushes_subnormals, torch.set_flush_denormal),
    # `torch.use_deterministic_algorithms` imports the compiler, which takes seconds.
    "the deterministic mode": Setting(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    ),
    "the precision of float32 products": Setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
}


def settings() -> dict[str, Any]:
    """Return the value of each setting, None for one that does not exist yet."""
    return {name: setting.read() for name, setting in SETTINGS.items()}


def put_back(before: Mapping[str, Any]) -> list[str]:
    """Set again what has another value now; return the names."""
    changed = list[str]()
    for name, setting in SETTINGS.items():
        value = before[name]
        if value is not None and setting.read() != value:
            setting.write(value)
            changed.append(name)
    return changed
