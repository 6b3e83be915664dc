"""Modes of a call: train or eval, and how gradients are recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch


class Mode(NamedTuple):
    """The modes of the module and of autograd: `enter` makes the context on a device, `code` is its source."""

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
        False, lambda device: torch.autocast(device, torch.bfloat16), "torch.autocast({device!r}, torch.bfloat16)"
    ),
}
