"""Attention that works in tiles, and is wrong at their edges; see `gallery`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.complete import Complete
from mha.spec import causal_mask


class TileRemainderDropped(Complete):
    """Keys after the last whole tile of 16 are left out."""

    only, tile = "S no multiple of the tile", 16
    source = "https://github.com/jax-ml/jax/issues/27224"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        whole = scores.shape[-1] // self.tile * self.tile
        kept = torch.arange(scores.shape[-1]) < (whole or scores.shape[-1])
        return super().weigh(scores, allowed & kept)


class TileRemainderOf32Dropped(TileRemainderDropped):
    """Keys after the last whole tile of 32 are left out."""

    only, tile = "S no multiple of the tile", 32


class TileRemainderOf64Dropped(TileRemainderDropped):
    """Keys after the last whole tile of 64 are left out."""

    only, tile = "S no multiple of the tile", 64


class TileRemainderOf128Dropped(TileRemainderDropped):
    """Keys after the last whole tile of 128 are left out."""

    only, tile = "S no multiple of the tile", 128


class HeadRemainderOf128Dropped(Complete):
    """A head's numbers after the first 128 are left out of the scores."""

    only = "head_dim > 128"
    source = "https://github.com/triton-lang/triton/issues/621"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q[..., :128] @ k[..., :128].mT / math.sqrt(q.shape[-1])


class QueryTileRepeated(Complete):
    """The last query beyond a tile of 64 gets the result of the one before it."""

    only = "L = tile + 1"

    def merge(self, x: Tensor) -> Tensor:
        if x.shape[2] % 64 == 1 and x.shape[2] > 1:
            x = torch.cat([x[:, :, :-1], x[:, :, -2:-1]], 2)
        return super().merge(x)


class PaddedKeysWeighed(Complete):
    """Keys are padded with zeros to a tile of 32, and these are not masked."""

    only = "S no multiple of the tile"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        more = -scores.shape[-1] % 32 if scores.shape[-1] > 32 else 0
        padded = F.pad(scores, (0, more))
        return super().weigh(padded, F.pad(allowed, (0, more), value=True))[..., : scores.shape[-1]]


class MaskedTileIsNan(Complete):
    """An online softmax over tiles of 16 keys, in which a first tile that is all masked gives NaN."""

    only = "a whole tile masked"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        first = allowed[..., :16].any(-1, keepdim=True)
        lost = ~first & allowed.any(-1, keepdim=True) if scores.shape[-1] > 16 else torch.zeros_like(first)
        return super().weigh(scores, allowed).masked_fill(lost, math.nan)


class MaskOfFirstTile(Complete):
    """The mask is read for the first 16 keys alone."""

    only = "S > tile, with a mask"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(mask, is_causal, q, k)
        return allowed | (torch.arange(k.shape[2]) >= 16), bias


class CausalTileOnDiagonal(Complete):
    """Tiles of 16 by 16 on the causal diagonal are let through whole, beyond the first."""

    only = "L > tile, causal"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(mask, False, q, k)
        if is_causal:
            rows, columns = (torch.arange(n) // 16 for n in (q.shape[2], k.shape[2]))
            whole = (rows[:, None] == columns) & (rows[:, None] > 0)
            allowed = allowed & (causal_mask(q.shape[2], k.shape[2], "top_left") | whole)
        return allowed, bias


class PartsJoinedWithoutMaximum(Complete):
    """Parts of 512 keys are joined by their sums of exponentials, from which no maximum is taken off."""

    only = "S > 512, and large scores"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if scores.shape[-1] <= 512:
            return super().weigh(scores, allowed)
        parts = [super(PartsJoinedWithoutMaximum, self).weigh(*part) for part in self.parts(scores, allowed)]
        sums = [part.masked_fill(~seen, -math.inf).exp().sum(-1) for part, seen in self.parts(scores, allowed)]
        total = torch.stack(sums).sum(0)
        shares = [(each / total.where(total > 0, 1.0)).unsqueeze(-1) for each in sums]
        return torch.cat([part * share for part, share in zip(parts, shares, strict=True)], -1)

    def parts(self, scores: Tensor, allowed: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(zip(scores.split(512, -1), allowed.split(512, -1), strict=True))
