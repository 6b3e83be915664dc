"""Modes of a call: train or eval, and the gradient mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch


class Mode(NamedTuple):
    """The mode of a call.

    training: whether the module is in training mode.
    enter: makes the context manager of the call, for a device.
    code: the source of that context manager, with {device} for the device; empty if there is none.
    """

    training: bool
    enter: Callable[[str], AbstractContextManager[Any]] = lambda device: nullcontext()
    code: str = ""


MODES = {
    "eval": Mode(False),
    "train": Mode(True),
    "no_grad": Mode(False, lambda device: torch.no_grad(), "torch.no_grad()"),
    "inference": Mode(False, lambda device: torch.inference_mode(), "torch.inference_mode()"),
    "train_no_grad": Mode(True, lambda device: torch.no_grad(), "torch.no_grad()"),
    "autocast": Mode(
        False,
        lambda device: torch.autocast(device, torch.bfloat16),
        "torch.autocast({device!r}, torch.bfloat16)",
    ),
}
