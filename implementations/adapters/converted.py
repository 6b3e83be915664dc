"""A module in another dtype, on another device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Where `Module.to` would make real numbers of complex ones. Narrower ones have few operations.
COMPLEX = {torch.float64: torch.complex128}


def converted(module: nn.Module, dtype: torch.dtype, device: str) -> nn.Module:
    """Return the module in a dtype, with complex buffers still complex.

    These are rotations (`freqs_cis`), of 32 bits for each part at least. `Module.to` would leave
    their real parts only, which nobody means; a module that is called as it was built keeps them.

    >>> module = nn.Module()
    >>> module.register_buffer("freqs_cis", torch.tensor([1j]))
    >>> converted(module, torch.float64, "cpu").freqs_cis
    tensor([0.+1.j], dtype=torch.complex128)
    """
    kept = list[tuple[nn.Module, str, Tensor]]()
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_complex():
                kept.append((part, name, buffer))
    for part, name, _ in kept:
        part._buffers[name] = None
    try:
        return module.to(device=device, dtype=dtype)
    finally:
        for part, name, buffer in kept:
            part._buffers[name] = buffer.to(device, COMPLEX.get(dtype, torch.complex64))
