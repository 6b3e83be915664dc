"""The words that a user gives: each is known, or refused in a line."""

from __future__ import annotations

from collections.abc import Collection

import torch

from mha.spec.claims import DEVICES


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
