"""What an explanation is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mha.conformance.harness.textbook import Inputs, TextbookAttention
from mha.spec import Output

# A method of `ExplainedAttention`.
Step = Callable[..., Any]


class ExplainedAttention(TextbookAttention):
    """The textbook's formula, which keeps what its masks were.

    allowed: boolean (B, H, L, S), of the last call.
    """

    allowed: Tensor

    def attend(self, inputs: Inputs, mask: Tensor | None, is_causal: bool, need_weights: bool) -> Output:
        """Attend to the inputs that the defect leaves."""
        return super().attend(self.take(*inputs), mask, is_causal, need_weights)

    def take(self, query: Tensor, key: Tensor, value: Tensor) -> Inputs:
        """Return the inputs to attend to."""
        return query, key, value

    def weigh(self, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        """Return the weights (B, H, L, S)."""
        self.allowed = allowed
        return self.weights_of(scores, allowed, bias)

    def weights_of(self, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        """Return the weights (B, H, L, S)."""
        return super().weigh(scores, allowed, bias)


@dataclass(frozen=True)
class Explanation:
    """A defect in words, and the attention that has it; family: the words for all that it is hard to tell from."""

    name: str
    text: str
    attention: type[ExplainedAttention]
    family: str = ""


def explain(name: str, text: str, family: str = "", **steps: Any) -> Explanation:
    """Return an explanation; steps: the methods and attributes that it overrides."""
    return Explanation(name, text, type(name, (ExplainedAttention,), {"__doc__": text, **steps}), family)
