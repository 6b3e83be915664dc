"""Computing as if nothing were set: what the caller has set in torch counts for nothing here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def undisturbed(device: str = "cpu") -> Iterator[None]:
    """Compute without gradients, autocast and a default device, for tensors on a type of device.

    All are as before afterwards. The default dtype is not read: every new tensor is given its own.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
