"""Implementations of multi-head attention, adapters for existing code, and how they are found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mha.implementations.adapters.kernel import from_kernel
from mha.implementations.adapters.mask_forms import MaskFormat, shape_mask
from mha.implementations.adapters.merge import from_merge
from mha.implementations.adapters.module import from_module
from mha.implementations.adapters.options import InputFormat
from mha.implementations.adapters.outputs import as_output
from mha.implementations.discovery.errors import (
    ImplementationError,
    UnavailableError,
    UnsupportedCallError,
)
from mha.implementations.discovery.resolve import Registered, Resolved, discover, preflight, resolve
from mha.implementations.inference.infer import Inference

if TYPE_CHECKING:
    from mha.implementations.adapters.sharded import from_sharded

__all__ = [
    "ImplementationError",
    "Inference",
    "InputFormat",
    "MaskFormat",
    "Registered",
    "Resolved",
    "UnavailableError",
    "UnsupportedCallError",
    "as_output",
    "discover",
    "from_kernel",
    "from_merge",
    "from_module",
    "from_sharded",
    "preflight",
    "resolve",
    "shape_mask",
]


def __getattr__(name: str) -> Any:
    if name != "from_sharded":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Loaded when it is asked for: DTensor takes a second to import.
    from mha.implementations.adapters.sharded import from_sharded

    return from_sharded
