"""What is left out of a call, and what is left from an earlier one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.harness.known_bad.defect import Defect, Step, defect
from mha.conformance.harness.textbook import Inputs, TextbookAttention
from mha.spec import Options

Allowed = tuple[Tensor, Tensor]
TILES = (8, 16, 32, 64, 128)
# What defects that are hard to tell from each other have in common.
TILE = "the keys after the last whole tile are left out"
ZEROS = "zeros that fill the last tile of keys are not masked"
STALE = "something of an earlier call with the same shapes is used again"


def tiles() -> Iterator[Defect]:
    """Yield keys, columns and masks that are left out, most of them at the edge of a tile."""
    yield defect(
        "no_last_key", "the last key is left out", allow=_with_keys(lambda S: range(max(S - 1, 1)))
    )
    yield defect(
        "no_first_key",
        "the first key is left out",
        allow=_with_keys(lambda S: range(min(1, S - 1), S)),
    )
    for tile in TILES:
        text = f"the keys after the last whole tile of {tile} are left out"
        yield defect(f"tile_{tile}", text, TILE, allow=_with_keys(partial(_whole_tiles, tile)))
        text = f"the key after the last whole tile of {tile} is left out"
        yield defect(f"after_{tile}", text, TILE, allow=_with_keys(partial(_without_single, tile)))
        text = f"only the first {tile} keys count"
        yield defect(f"first_{tile}", text, TILE, allow=_with_keys(partial(_first_of, tile)))
        text = f"zeros that fill the last tile of {tile} keys are not masked"
        yield defect(f"zeros_of_{tile}", text, ZEROS, weigh=_with_zeros(tile))
        yield defect(
            f"empty_inputs_of_{tile}", text, ZEROS, take=_filled_up(tile), allow=_beyond_allowed
        )
        text = f"the mask is applied to the first {tile} keys only"
        yield defect(f"mask_of_{tile}", text, allow=_always_from(tile))
    text = "only the first L keys count, with L the number of queries"
    yield defect("first_L", text, allow=_as_many_as_queries)
    for width in (*TILES, 256):
        text = f"only the first {width} columns of a head enter the scores"
        yield defect(f"columns_{width}", text, score=_columns(partial(min, width)))
    text = "the columns of a head are read in eights, without the remainder, for the scores"
    yield defect("columns_in_eights", text, score=_columns(lambda d: d // 8 * 8 or d))
    text = "the last column of a head of odd width is left out of the scores"
    yield defect("odd_column", text, score=_columns(lambda d: d // 2 * 2 or 1))
    for factor, text in ((0.0, "is read as zero"), (2.0, "counts twice")):
        yield defect(
            f"last_value_{factor:g}",
            f"the value of the last key {text}",
            project=_last_value(factor),
        )


def _whole_tiles(tile: int, keys: int) -> range:
    return range(keys // tile * tile or keys)


def _without_single(tile: int, keys: int) -> range:
    return range(keys - int(keys % tile == 1 < keys))


def _first_of(tile: int, keys: int) -> range:
    return range(min(tile, keys))


def _with_keys(kept: Callable[[int], range]) -> Step:
    """Return `allow` with some keys only; kept: which, of the number of keys."""

    def allow(self: TextbookAttention, options: Options, scores: Tensor) -> Allowed:
        allowed, bias = TextbookAttention.allow(self, options, scores)
        places, keys = torch.arange(scores.shape[3]), kept(scores.shape[3])
        return allowed & (places >= keys.start) & (places < keys.stop), bias

    return allow


def _as_many_as_queries(self: TextbookAttention, options: Options, scores: Tensor) -> Allowed:
    allowed, bias = TextbookAttention.allow(self, options, scores)
    return allowed & (torch.arange(scores.shape[3]) < scores.shape[2]), bias


def _with_zeros(tile: int) -> Step:
    """Return `weigh` where keys and values of zeros, not masked, fill the last tile."""

    def weigh(self: TextbookAttention, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        keys = scores.shape[3]
        total = (scores + bias).masked_fill(~allowed, -math.inf)
        return F.pad(total, (0, -keys % tile)).softmax(-1)[..., :keys]

    return weigh


def _filled_up(tile: int) -> Step:
    """Return `take` where keys and values of zeros fill the last tile before the projections."""

    def take(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Inputs:
        self.given = key.shape[1]
        added = -self.given % tile
        return query, F.pad(key, (0, 0, 0, added)), F.pad(value, (0, 0, 0, added))

    return take


def _beyond_allowed(self: Any, options: Options, scores: Tensor) -> Allowed:
    """Mask the keys that were given, and allow those that fill the last tile."""
    allowed, bias = TextbookAttention.allow(self, options, scores[..., : self.given])
    added = (0, scores.shape[3] - self.given)
    return F.pad(allowed, added, value=True), F.pad(bias, added)


def _columns(kept: Callable[[int], int]) -> Step:
    """Return `score` of the first columns of each head."""

    def score(self: TextbookAttention, q: Tensor, k: Tensor) -> Tensor:
        width = kept(q.shape[-1])
        return TextbookAttention.score(self, q[..., :width], k[..., :width])

    return score


def _always_from(tile: int) -> Step:
    """Return `allow` where no mask can exclude the keys after the first tile."""

    def allow(self: TextbookAttention, options: Options, scores: Tensor) -> Allowed:
        allowed, bias = TextbookAttention.allow(self, options, scores)
        return allowed | (torch.arange(scores.shape[3]) >= tile), bias

    return allow


def _last_value(factor: float) -> Step:
    def project(self: TextbookAttention, x: Tensor, role: str) -> Tensor:
        heads = TextbookAttention.project(self, x, role)
        return torch.cat([heads[:, :, :-1], factor * heads[:, :, -1:]], 2) if role == "v" else heads

    return project


def stale() -> Iterator[Defect]:
    """Yield what is kept from one call to the next."""
    for newest, which in ((False, "the first call"), (True, "the call before")):
        text = f"the mask of {which} with the same shapes is used again"
        yield defect(f"stale_mask_{newest}", text, STALE, allow=_stale_mask(newest))
        text = f"the weights of {which} with the same shapes are used again"
        yield defect(f"stale_weights_{newest}", text, STALE, weigh=_stale_weights(newest))
        text = f"the scores of {which} with the same shapes are used again"
        yield defect(f"stale_scores_{newest}", text, STALE, score=_stale_scores(newest))
        text = f"the output of {which} with the same shapes is returned again"
        yield defect(f"stale_output_{newest}", text, STALE, combine=_stale_output(newest))


def _kept(self: Any, key: Any, value: Any, newest: bool) -> Any:
    """Return what the instance kept under a key in an earlier call, or else this value, which it
    keeps.
    """
    kept: dict[Any, Any] = self.__dict__.setdefault("kept", {})
    earlier = kept.get(key, value)
    if newest or key not in kept:
        kept[key] = value
    return earlier


def _stale_mask(newest: bool) -> Step:
    def allow(self: TextbookAttention, options: Options, scores: Tensor) -> Allowed:
        allowed = TextbookAttention.allow(self, options, scores)
        if options.mask is None and not options.is_causal:
            return allowed
        earlier: Allowed = _kept(self, scores.shape, allowed, newest)
        return earlier

    return allow


def _stale_weights(newest: bool) -> Step:
    def weigh(self: TextbookAttention, scores: Tensor, allowed: Tensor, bias: Tensor) -> Any:
        return _kept(
            self, scores.shape, TextbookAttention.weigh(self, scores, allowed, bias), newest
        )

    return weigh


def _stale_scores(newest: bool) -> Step:
    def score(self: TextbookAttention, q: Tensor, k: Tensor) -> Any:
        return _kept(self, (q.shape, k.shape), TextbookAttention.score(self, q, k), newest)

    return score


def _stale_output(newest: bool) -> Step:
    def combine(self: TextbookAttention, weights: Tensor, v: Tensor, query: Tensor) -> Any:
        return _kept(self, query.shape, TextbookAttention.combine(self, weights, v, query), newest)

    return combine
