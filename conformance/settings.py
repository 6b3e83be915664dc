"""The words that a user gives: each is known, or refused in a line."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from mha.implementations import Resolved
from mha.spec.claims import DEVICES


def named_once(found: Iterable[Resolved]) -> dict[str, Resolved]:
    """Return implementations by their names; raises ValueError where two have the same name.

    The same implementation may be given twice.
    """
    by_name: dict[str, Resolved] = {}
    for resolved in found:
        name = resolved.implementation.name
        if by_name.setdefault(name, resolved).implementation is not resolved.implementation:
            raise ValueError(f"two implementations are named {name!r}; give one of them another name")
    return by_name


def validate_choice(what: str, given: Collection[str], known: Collection[str]) -> None:
    """Raise ValueError unless every word is known."""
    for word in given:
        if word not in known:
            raise ValueError(f"there is no {what} {word!r}; known are {', '.join(known)}")


def validate_devices(devices: Collection[str]) -> None:
    """Raise ValueError unless every device is known and there."""
    validate_choice("device", devices, DEVICES)
    if "cuda" in devices and not torch.cuda.is_available():
        raise ValueError("the device 'cuda' was asked for, but torch finds no CUDA device here; judge on 'cpu'")
