"""Implementations of multi-head attention, adapters for existing code, and how implementations are found."""

from mha.implementations.adapters.calling import as_output
from mha.implementations.adapters.kernel import from_kernel
from mha.implementations.adapters.masks import MaskFormat, shape_mask
from mha.implementations.adapters.module import from_module
from mha.implementations.discovery import Registered, Resolved, discover, preflight, resolve
from mha.implementations.errors import ImplementationError, UnavailableError, UnsupportedCallError
from mha.implementations.inference.infer import Inference

__all__ = [
    "ImplementationError",
    "Inference",
    "MaskFormat",
    "Registered",
    "Resolved",
    "UnavailableError",
    "UnsupportedCallError",
    "as_output",
    "discover",
    "from_kernel",
    "from_module",
    "preflight",
    "resolve",
    "shape_mask",
]
