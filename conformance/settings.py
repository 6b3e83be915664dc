"""The words that a user gives: each is known, or refused in a line."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from mha.spec import Implementation
from mha.spec.claims import DEVICES


def named_once(found: Iterable[tuple[str, Implementation]]) -> dict[str, tuple[str, Implementation]]:
    """Return targets and the implementations that they name by the implementations' names, or raise ValueError.

    One implementation may be named twice, but no two may have one name. The target of what "all" named is its name.
    """
    by_name: dict[str, tuple[str, Implementation]] = {}
    for target, implementation in found:
        known = implementation.name if target == "all" else target
        if by_name.setdefault(implementation.name, (known, implementation))[1] is not implementation:
            raise ValueError(f"two implementations are named {implementation.name!r}; give one of them another name")
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
