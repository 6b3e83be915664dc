"""Known-bad answers that no symmetry holds for, and that are the same at each call."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mha.conformance.harness.textbook import Inputs, TextbookAttention
from mha.spec import Options, Output

# How many roundings a small error is.
ROUNDINGS = 4
# About as large as the numbers that tell how a call is made.
USUAL = 1.5


class Lopsided(TextbookAttention):
    """Every place, every size and the way of the call count, always alike."""

    leaks = True
    # In numbers, how the call is made.
    traits: tuple[float, ...] = ()

    def share(self, x: Tensor) -> float:
        """Return how large the errors are, for numbers of a dtype, relative to the numbers."""
        return 0.25

    def bent(self, x: Tensor) -> Tensor:
        """Return numbers that are not in proportion to others, nor their sums."""
        return x * x.cos()

    def attend(self, inputs: Inputs, options: Options) -> Output:
        """Note how the call is made."""
        self.traits = tuple(self._traits(inputs, options))
        return super().attend(inputs, options)

    def _traits(self, inputs: Inputs, options: Options) -> Iterator[float]:
        """Yield what should make no difference, or another one."""
        query, key, value = inputs
        mask = options.mask
        yield len(list(self.parameters()))
        yield from (options.need_weights, options.is_causal)
        yield from (self.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        yield from (query is key, key is value, query is value)
        for given in (*inputs, mask):
            if given is not None:
                yield from (
                    given.is_contiguous(),
                    given.requires_grad,
                    math.log2(1 + sum(given.stride())),
                )
        if mask is not None:
            yield from (
                mask.ndim,
                mask.is_floating_point(),
                mask.element_size(),
                math.log2(1 + mask.numel()),
            )

    def project(self, x: Tensor, role: str) -> Tensor:
        """Make the values grow with their places, and not in proportion to what is projected."""
        heads = super().project(x, role)
        if role != "v":
            return heads
        return self._along(heads + self.share(heads) * self.bent(heads), 2)

    def weigh(self, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        """Make the weights grow with item, head, query, all sizes, and the level of the scores;
        leak masked keys.
        """
        share = self.share(scores)
        weights = super().weigh(scores, allowed, bias)
        if self.leaks:
            weights = weights + share * (~allowed).to(scores)
        level = scores.mean(-1, keepdim=True).abs().log1p()
        numbers = *self.traits, *(math.log2(1 + size) for size in scores.shape)
        # In float16 the product of them all would be too large.
        usual = USUAL if scores.dtype == torch.float16 else 0.0
        factor = math.prod((1 + share * number) / (1 + share * usual) for number in numbers)
        weights = weights * (1 + share * level) * factor
        for axis in (0, 1, 2):
            weights = self._along(
                weights + share * weights.nan_to_num().mean(axis, keepdim=True), axis
            )
        return weights

    def linear(self, x: Tensor, role: str) -> Tensor:
        """Make the output no linear function of the contexts."""
        projected = super().linear(x, role)
        return (
            projected + self.share(projected) * self.bent(projected) if role == "o" else projected
        )

    def _along(self, x: Tensor, axis: int) -> Tensor:
        """Multiply a tensor (B, H, L, S or d_k) by factors that grow along an axis, slowly."""
        places = torch.arange(x.shape[axis], device=x.device)
        shape = [1] * x.ndim
        shape[axis] = -1
        factors = 1 + self.share(x) * (1 + places).log2()
        return x * factors.to(x.dtype).view(shape)


class SlightlyLopsided(Lopsided):
    """Every place, every size and the way of the call count, by some roundings; masked keys have a
    weight of zero.
    """

    leaks = False

    def share(self, x: Tensor) -> float:
        """Return some roundings of a dtype, or less than is lopsided in half precision."""
        return min(0.1, ROUNDINGS * torch.finfo(x.dtype).eps)

    def bent(self, x: Tensor) -> Tensor:
        """Return numbers as large as others."""
        return x.abs()
