"""What a defect is, and the implementation that has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mha.conformance.harness.textbook import TextbookAttention
from mha.spec import Claims, Config, Weights

# A method of `TextbookAttention`.
Step = Callable[..., Any]


@dataclass(frozen=True)
class Defect:
    """A defect in words, and the attention that has it.

    family: the words for all that it is hard to tell from. unexplained: the share of an error that
    it may leave unexplained, where rounding before it decides what it does.
    """

    name: str
    text: str
    attention: type[TextbookAttention]
    family: str = ""
    unexplained: float = 0.0


@dataclass(frozen=True, eq=False)
class KnownBad:
    """An implementation with a defect, and with the claims of the one that it stands in for.

    generator: shared by all that it builds, so that no two of their draws are equal. joins_causal:
    see `TextbookAttention`.
    """

    defect: Defect
    claims: Claims
    joins_causal: bool = False
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    @property
    def name(self) -> str:
        """The name of the defect."""
        return self.defect.name

    def build(
        self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str
    ) -> TextbookAttention:
        """Build it; no configuration is refused."""
        attention = self.defect.attention(self.claims, config, weights, self.generator).to(device)
        attention.joins_causal = self.joins_causal
        return attention


def defect(name: str, text: str, family: str = "", **steps: Any) -> Defect:
    """Return a defect; steps: the methods and attributes that it overrides."""
    return Defect(name, text, type(name, (TextbookAttention,), {"__doc__": text, **steps}), family)
