"""Known-bad answers that are right in most calls, but remember, forget, drop or make up what they
should not.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.harness.textbook import Inputs, TextbookAttention
from mha.spec import Claims, Config, Options, Output, Weights


class Haunted(TextbookAttention):
    """What the call before was given shows in the output, unless it was the same."""

    before: Tensor | None = None

    def attend(self, inputs: Inputs, options: Options) -> Output:
        """Add the difference between what the call before was given and what this one is."""
        output, weights, _ = super().attend(inputs, options)
        given = torch.stack([x.detach().abs().sum() for x in inputs]).sum()
        before, self.before = self.before, given
        return Output(output if before is None else output + (before - given), weights)


class OwnBits(TextbookAttention):
    """The last bits of the output are drawn anew in each call."""

    def combine(self, weights: Tensor, v: Tensor, query: Tensor) -> Tensor:
        """Move each number by up to 4 roundings."""
        output = super().combine(weights, v, query)
        drawn = torch.randint(-4, 5, output.shape, generator=self.generator).to(output)
        return output * (1 + torch.finfo(output.dtype).eps * drawn)


class Unsaved(TextbookAttention):
    """A factor is computed from the first weights, which no state_dict has, and no copy."""

    def __init__(
        self, claims: Claims, config: Config, weights: Weights, generator: torch.Generator
    ) -> None:
        super().__init__(claims, config, weights, generator)
        self.factor = 1 + float(weights.w_q.abs().double().mean())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, without the factor."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # of torch
        self.factor = 0.5

    def combine(self, weights: Tensor, v: Tensor, query: Tensor) -> Tensor:
        """Multiply the output by the factor."""
        return super().combine(weights, v, query) * self.factor


class NeverEmpty(TextbookAttention):
    """Of no items or no queries, one is made up; a sum of no values is 1."""

    def attend(self, inputs: Inputs, options: Options) -> Output:
        """Return ones where there is nothing to attend to."""
        items, queries, width = inputs[0].shape
        if items and queries and inputs[1].shape[1]:
            return super().attend(inputs, options)
        return Output(inputs[0].new_ones(max(1, items), max(1, queries), width), None)


class SpendsItsGraph(TextbookAttention):
    """A second backward pass of one graph gives twice the gradients."""

    def combine(self, weights: Tensor, v: Tensor, query: Tensor) -> Tensor:
        """Multiply the gradient of the output by the number of backward passes so far."""
        output = super().combine(weights, v, query)
        if output.requires_grad:
            passes = count(1)
            output.register_hook(lambda gradient: gradient * next(passes))
        return output


class FirstKeyIfEmpty(TextbookAttention):
    """A row without an allowed key attends to the first key."""

    def weigh(self, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        """Give the first key of an empty row all weight."""
        weights = super().weigh(scores, allowed, bias)
        first = torch.zeros_like(weights)
        first[..., :1] = 1.0
        return torch.where(allowed.any(-1, keepdim=True), weights, first)


class OwnDraws(TextbookAttention):
    """What is dropped does not depend on torch's seed."""

    def combine(self, weights: Tensor, v: Tensor, query: Tensor) -> Tensor:
        """Seed torch from a generator of one's own first."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(int(torch.randint(1 << 31, (), generator=self.generator)))
            return super().combine(weights, v, query)


class SharedDraws(TextbookAttention):
    """All heads and all items drop the same weights."""

    def combine(self, weights: Tensor, v: Tensor, query: Tensor) -> Tensor:
        """Drop in the first head of the first item, and in all others alike."""
        pattern = F.dropout(torch.ones_like(weights[:1, :1]), self.config.dropout, self.training)
        return self.linear(self.merge((weights * pattern) @ v).to(query), "o")


class DropsNothingBackward(TextbookAttention):
    """The gradients are those of an output that dropped nothing."""

    def combine(self, weights: Tensor, v: Tensor, query: Tensor) -> Tensor:
        """Return the value with dropout, and the gradient without."""
        value = super().combine(weights, v, query)
        differentiated = self.linear(self.merge(weights @ v).to(query), "o")
        return value.detach() + (differentiated - differentiated.detach())
