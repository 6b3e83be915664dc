"""Faults that NUM-7 must catch: in half precision, too small for the bound on each element."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mha.conformance.faults.base import Complete
from mha.conformance.faults.fault import fault


def _half(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16)


@fault("NUM-7", dtype="float16", caught_by="errors_do_not_add_up_to_a_defect", script_shows=False)
@fault(
    "NUM-7",
    dtype="bfloat16",
    caught_by="errors_do_not_add_up_to_a_defect",
    script_shows=False,
    trigger="half precision",
)
class ScaleOffInHalf(Complete):
    """In half precision the scores are 1% too large."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * (1.01 / math.sqrt(self.config.head_dim)) if _half(q) else super().score(q, k)


@fault(
    "NUM-7",
    dtype="bfloat16",
    caught_by="errors_do_not_add_up_to_a_defect",
    script_shows=False,
    trigger="bfloat16",
)
class CastsTruncate(Complete):
    """Weights and contexts are cast to bfloat16 by dropping bits, not by rounding to the nearest number."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return self.cast(super().weigh(scores.to(self.wide(scores)), allowed), scores)

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        wide = self.wide(v)
        return self.cast(super().combine(weights.to(wide), v.to(wide), allowed), v)

    def wide(self, x: Tensor) -> torch.dtype:
        """Return the dtype in which to compute."""
        return torch.float32 if x.dtype == torch.bfloat16 else x.dtype

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
    script_shows=False,
    trigger="half precision, S > 512",
)
class LateValuesLost(Complete):
    """In half precision the values after the first 512 are read as zeros."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        if _half(v):
            v = v.masked_fill((torch.arange(v.shape[2]) >= 512).unsqueeze(-1), 0.0)
        return super().combine(weights, v, allowed)
