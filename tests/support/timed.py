"""What tests of timings time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mha.implementations import resolve
from mha.spec import Claims, Config, Implementation, Weights

SIZES: dict[str, Any] = {
    "B": 2,
    "n_heads": 2,
    "head_dim": 8,
    "L": 16,
    "S": 16,
    "mask": "padding",
    "inputs": "self",
}
# Of a kernel.
HEADS: dict[str, Any] = {
    "B": 2,
    "n_heads": 4,
    "head_dim": 8,
    "L": 16,
    "S": 16,
    "causal": True,
    "projected": False,
}

VECTORIZED = resolve("vectorized")[0].implementation


@dataclass
class Changed:
    """Another implementation, changed after it was built."""

    name: str
    of: Implementation
    change: Callable[[Any], object]

    @property
    def claims(self) -> Claims:
        """The claims of the other implementation."""
        return self.of.claims

    def build(self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str) -> Any:
        """Build the other implementation, and change it."""
        attention: Any = self.of.build(config, weights, dtype=dtype, device=device)
        self.change(attention)
        return attention
