"""Faults that NUM-5 must catch: long rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mha.conformance.faults.base import Complete
from mha.conformance.faults.fault import fault


@fault("NUM-5", caught_by="long_rows_are_within_the_bound", trigger="S > 1024")
class FirstThousandKeys(Complete):
    """A key index of ten bits: keys after the first 1024 are left out."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(
            scores, allowed & (torch.arange(scores.shape[-1], device=scores.device) < 1024)
        )


@fault("NUM-5", trigger="a whole tile masked")
class MaskedTileIsNan(Complete):
    """An online softmax over tiles of 16 keys, in which a first tile that is masked gives NaN."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        first = allowed[..., :16].any(-1, keepdim=True)
        lost = torch.zeros_like(first)
        if scores.shape[-1] > 16:
            lost = ~first & allowed.any(-1, keepdim=True)
        return super().weigh(scores, allowed).masked_fill(lost, math.nan)


@fault(
    "NUM-5",
    trigger="L * S > 65536",
    source="https://github.com/fla-org/flash-linear-attention/issues/1080",
)
class IndexOfSixteenBits(Complete):
    """A score index of sixteen bits: scores of a head after the 65,536th repeat the first ones."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        flat = scores.flatten(2)
        if flat.shape[2] > 65536:
            return flat[..., torch.arange(flat.shape[2]) % 65536].view(scores.shape)
        return scores


@fault("NUM-5", trigger="S > 512, and large scores")
class PartsJoinedWithoutMaximum(Complete):
    """Parts of 512 keys are joined by sums of exponentials, without subtracting the maximum."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if scores.shape[-1] <= 512:
            return super().weigh(scores, allowed)
        parts = [
            super(PartsJoinedWithoutMaximum, self).weigh(*part)
            for part in self.parts(scores, allowed)
        ]
        sums = [
            part.masked_fill(~own, -math.inf).exp().sum(-1)
            for part, own in self.parts(scores, allowed)
        ]
        total = torch.stack(sums).sum(0)
        shares = [(each / total.where(total > 0, 1.0)).unsqueeze(-1) for each in sums]
        return torch.cat([part * share for part, share in zip(parts, shares, strict=True)], -1)

    def parts(self, scores: Tensor, allowed: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(zip(scores.split(512, -1), allowed.split(512, -1), strict=True))
