"""Faults that NUM-7 and MSK-1 must catch where heads are stored in float8, a scale a row."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.faults.base import CLAIMS, Complete
from mha.conformance.faults.fault import fault

FLOAT8 = torch.float8_e4m3fn
IN_FLOAT8 = replace(
    CLAIMS, composes=(), rounding=replace(CLAIMS.rounding, heads_stored="float8_e4m3fn")
)


class HeadsInFloat8(Complete):
    """A correct class: projected rows are divided by their scales, stored in float8, and read back.

    of_scale: the dimensions over which numbers share a scale.
    """

    of_scale: tuple[int, ...] = (-1,)

    def split(self, x: Tensor) -> Tensor:
        """Split (B, N, heads * d_k) into heads (B, heads, N, d_k) of numbers that float8 holds."""
        heads = super().split(x)
        if not heads.numel():
            return heads
        exact = heads.detach().to(torch.promote_types(x.dtype, torch.float32))
        scale = exact.abs().amax(self.of_scale, keepdim=True) / torch.finfo(FLOAT8).max
        scale = scale.masked_fill(scale == 0, 1.0)
        stored = (exact / scale).to(FLOAT8)
        return (stored.to(exact) * scale).to(x) + (heads - heads.detach())


@fault("NUM-7", dtype="float16", claims=IN_FLOAT8)
@fault("NUM-7", dtype="bfloat16", claims=IN_FLOAT8, trigger="half precision, heads in float8")
class ScaleOffInFloat8(HeadsInFloat8):
    """With heads in float8 the scores are 5% too large."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * 1.05


@fault("MSK-1", claims=IN_FLOAT8, trigger="masked values larger than the others")
class ScaleOfMaskedRows(HeadsInFloat8):
    """The rows of a head share a scale in float8, which the rows of masked keys have a part in."""

    of_scale = (-2, -1)
