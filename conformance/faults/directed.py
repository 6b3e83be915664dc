"""Faults that NUM-7 and GRD-8 must catch: in half precision, below the bound of each number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mha.conformance.faults.base import Complete
from mha.conformance.faults.families import hooked, is_half, scores_scaled
from mha.conformance.faults.fault import fault


def in_half(module: Complete) -> bool:
    """Return whether a module is in half precision."""
    return is_half(next(module.parameters()))


@fault("NUM-7", dtype="float16", caught_by="errors_do_not_add_up_to_a_defect")
@fault(
    "NUM-7",
    dtype="bfloat16",
    caught_by="errors_do_not_add_up_to_a_defect",
    trigger="half precision",
)
class ScaleOffInHalf(scores_scaled(1.01, when=in_half)):
    """In half precision the scores are 1% too large."""


@fault(
    "NUM-7",
    dtype="bfloat16",
    caught_by="errors_in_a_large_batch_do_not_add_up_to_a_defect",
    trigger="half precision",
)
class ScaleSlightlyOffInHalf(scores_scaled(1.005, when=in_half)):
    """In half precision the scores are 0.5% too large."""


@fault(
    "NUM-7",
    dtype="bfloat16",
    caught_by="errors_in_a_large_batch_do_not_add_up_to_a_defect",
    trigger="half precision, inference mode",
)
class ScaleOffInInference(
    scores_scaled(0.995, when=lambda module: torch.is_inference_mode_enabled() and in_half(module))
):
    """In half precision and inference mode the scores are 0.5% too small."""


@fault(
    "NUM-7",
    dtype="bfloat16",
    caught_by="errors_for_two_keys_do_not_add_up_to_a_defect",
    trigger="half precision",
)
class EpsilonInHalf(Complete):
    """In half precision 0.0015 of the largest term is added to the sum of each row."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if not is_half(scores):
            return super().weigh(scores, allowed)
        weights = super().weigh(scores.float(), allowed)
        return (weights / (1 + 0.0015 * weights.amax(-1, keepdim=True))).to(scores)


@fault(
    "NUM-7",
    dtype="bfloat16",
    caught_by="errors_do_not_add_up_to_a_defect",
    trigger="bfloat16",
)
class CastsTruncate(Complete):
    """Weights and contexts are cast to bfloat16 by dropping bits, not by rounding to the nearest
    number.
    """

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return self.cast(super().weigh(scores.to(self.wide(scores)), allowed), scores)

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        wide = self.wide(v)
        return self.cast(super().combine(weights.to(wide), v.to(wide), allowed), v)

    def wide(self, x: Tensor) -> torch.dtype:
        """Return the dtype in which to compute."""
        if x.dtype == torch.bfloat16:
            return torch.float32
        return x.dtype

    def cast(self, x: Tensor, like: Tensor) -> Tensor:
        """Return numbers in the dtype of another tensor, with the gradient of a cast."""
        if like.dtype != torch.bfloat16:
            return x
        kept = (x.detach().view(torch.int32) & -65536).view(torch.float32)
        return (x + (kept - x.detach())).bfloat16()


@fault(
    "NUM-7",
    dtype="bfloat16",
    caught_by="errors_for_many_keys_do_not_add_up_to_a_defect",
    trigger="half precision, S > 512",
)
class LateValuesLost(Complete):
    """In half precision the values after the first 512 are read as zeros."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        if is_half(v):
            v = v.masked_fill((torch.arange(v.shape[2], device=v.device) >= 512).unsqueeze(-1), 0.0)
        return super().combine(weights, v, allowed)


@fault(
    "NUM-7",
    dtype="bfloat16",
    caught_by="errors_for_more_than_1024_keys_do_not_add_up_to_a_defect",
    trigger="half precision, S > 1024",
)
class KeyOfSecondBlockLost(Complete):
    """In half precision the first key after a block of 1024 is not read."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        lost = is_half(scores) & (torch.arange(scores.shape[-1], device=scores.device) == 1024)
        return super().weigh(scores, allowed & ~lost)


@fault("GRD-8", dtype="float16", caught_by="errors_of_gradients_do_not_add_up_to_a_defect")
@fault(
    "GRD-8",
    dtype="bfloat16",
    caught_by="errors_of_gradients_do_not_add_up_to_a_defect",
    trigger="half precision, backwards",
)
class KeyGradientOffInHalf(Complete):
    """In half precision the gradient of the keys is 4% too large."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        factor = 1.04 if is_half(k) else 1.0
        return super().score(q, hooked(k, lambda gradient: gradient * factor))


@fault(
    "GRD-8",
    dtype="bfloat16",
    caught_by="errors_of_gradients_in_a_large_batch_do_not_add_up_to_a_defect",
    trigger="half precision, more than 16 items, backwards",
)
class LargeBatchOffBackwards(Complete):
    """In half precision the gradients of the scores of more than 16 items are 1.5% too large."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        factor = 1.015 if is_half(q) and 16 < len(q) < 1000 else 1.0
        return hooked(super().score(q, k), lambda gradient: gradient * factor)


@fault(
    "GRD-8",
    dtype="bfloat16",
    caught_by="errors_of_gradients_for_two_keys_do_not_add_up_to_a_defect",
    trigger="half precision, two keys, backwards",
)
class TwoKeysOffBackwards(Complete):
    """In half precision the gradients of the scores of two keys are 4% too large."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        factor = 1.04 if is_half(q) and k.shape[2] == 2 else 1.0
        return hooked(super().score(q, k), lambda gradient: gradient * factor)


class _SoftmaxOffBackwards(torch.autograd.Function):
    """A softmax whose backward pass subtracts 95% of the row sum in half precision."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = scores.softmax(-1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        row_sum = (weights * gradient).sum(-1, keepdim=True)
        return weights * (gradient - row_sum * (0.95 if is_half(gradient) else 1.0))


@fault(
    "GRD-8",
    dtype="float16",
    caught_by="errors_of_gradients_do_not_add_up_to_a_defect",
    trigger="half precision, backwards",
)
class RowSumOffInHalf(Complete):
    """In half precision the backward pass of the softmax subtracts 95% of the row sum."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if not is_half(scores):
            return super().weigh(scores, allowed)
        empty = ~allowed.any(-1, keepdim=True)
        filled = scores.masked_fill(~(allowed | empty), -torch.inf)
        return _SoftmaxOffBackwards.apply(filled).masked_fill(~allowed, 0.0)


@fault(
    "GRD-8",
    dtype="bfloat16",
    caught_by="errors_of_gradients_do_not_add_up_to_a_defect",
    trigger="half precision, backwards",
)
class LastKeyLostBackwards(Complete):
    """In half precision the gradients of the last key are half as large as they should be."""

    def extend(self, x: Tensor, name: str) -> Tensor:
        return super().extend(hooked(x, self.without_half_of_last), name)

    def without_half_of_last(self, gradient: Tensor) -> Tensor:
        """Return the gradients of heads (B, heads, N, d_k), of the last position by half."""
        if not is_half(gradient) or gradient.shape[2] < 2:
            return gradient
        return torch.cat([gradient[:, :, :-1], gradient[:, :, -1:] / 2], 2)


@fault(
    "NUM-8",
    dtype="bfloat16",
    caught_by="errors_for_many_keys_are_not_twice_what_roundings_explain",
    script_shows=False,
)
@fault(
    "NUM-7",
    dtype="bfloat16",
    caught_by="errors_for_4096_keys_do_not_add_up_to_a_defect",
    trigger="half precision, 4096 keys",
)
class SummedTileByTile(Complete):
    """The denominator is kept in half precision from one tile of 16 keys to the next."""

    tile = 16

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if scores.shape[-1] <= 1024 or torch.finfo(scores.dtype).bits > 16:
            return super().weigh(scores, allowed)
        raised = (scores - scores.amax(-1, keepdim=True)).float().exp().masked_fill(~allowed, 0.0)
        total = torch.zeros_like(scores[..., :1])
        for tile in raised.split(self.tile, -1):
            total = total + tile.sum(-1, keepdim=True).to(scores)
        return (raised / total.float()).to(scores)


@fault(
    "NUM-8",
    dtype="bfloat16",
    caught_by="errors_for_very_many_keys_are_not_twice_what_roundings_explain",
    script_shows=False,
    trigger="bfloat16, 16384 keys",
)
class SummedByWiderTiles(SummedTileByTile):
    """The denominator is kept in half precision from one tile of 64 keys to the next."""

    tile = 64
