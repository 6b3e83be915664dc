"""Objects that raise when they are looked at, as lazy imports and mocks do."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class Raises:
    """Raises whatever it is asked for."""

    def __getattribute__(self, name: str) -> Any:
        raise ImportError(f"{name} is optional, and not installed")


class NoTruth(ModuleType):
    """Cannot be compared, hashed, or asked whether it is true."""

    __hash__ = None  # type: ignore[assignment]  # as of a class that cannot be hashed

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __bool__(self) -> bool:
        raise RuntimeError("asked for its truth")


class NoClass:
    """Raises when it is asked for its class, as `isinstance` does."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]  # as a proxy may
        raise ImportError("optional")


def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)
