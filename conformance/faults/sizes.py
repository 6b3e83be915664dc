"""Attention that is wrong for some sizes, layouts, masks or calls; see `gallery`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mha.conformance.faults.correct import Correct
from mha.spec import Config, Output


class DropsKeyAfterTile(Correct):
    """The key after a full tile is left out."""

    only = "S = tile + 1"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        whole = scores.shape[-1] // 16 * 16
        if 0 < whole < scores.shape[-1]:
            allowed = allowed & (torch.arange(scores.shape[-1]) < whole)
        return super().weigh(scores, allowed)


class SqueezesBatchOfOne(Correct):
    """A batch of one loses its dimension."""

    only = "B = 1"

    def forward(self, query: Tensor, *rest: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Output:
        output, weights = super().forward(query, *rest, mask=mask, is_causal=is_causal)
        return Output(output.squeeze(0), weights)


class ReadsMemoryAsDense(Correct):
    """The input's memory is read as if it were dense."""

    only = "inputs that are not contiguous"
    source = "https://github.com/Dao-AILab/flash-attention/pull/2670"

    def forward(self, query: Tensor, *rest: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Output:
        return super().forward(query.as_strided(query.shape, torch.empty(query.shape).stride()), *rest, mask, is_causal)


class MeanOfValues(Correct):
    """The mean of the values, without a look at queries and keys."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * 0


class RepeatsItself(Correct):
    """The last result is given again for a query of the same shape."""

    only = "a second call"

    last: Output | None = None

    def forward(self, query: Tensor, *rest: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Output:
        if self.last is None or self.last.output.shape != query.shape:
            self.last = super().forward(query, *rest, mask=mask, is_causal=is_causal)
        return self.last


class BatchOfKeysBroadcast(Correct):
    """Keys of one item are broadcast to a larger batch."""

    only = "keys of one item, queries of several"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Output:
        if key.shape[0] == value.shape[0] == 1:
            key, value = (x.expand(query.shape[0], -1, -1) for x in (key, value))
        return super().forward(query, key, value, mask, is_causal)


class IntegerMaskAsBoolean(Correct):
    """A mask of integers is read as a boolean one."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Output:
        return super().forward(query, key, value, None if mask is None else mask.bool(), is_causal)


class NoValidation(Correct):
    """Nothing is validated."""

    source = "https://github.com/pytorch/pytorch/pull/193728"

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, 1, bias)
        self.config = Config(d_model, n_heads, bias=bias)


class EmptyUnderCausal(Correct):
    """A row that only the causal mask and the padding together leave empty is NaN."""

    only = "causal, with a mask, an empty row"
    source = "https://github.com/pytorch/pytorch/pull/190486"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        self.spoilt = torch.zeros((), dtype=torch.bool)
        allowed = super().allow(mask, is_causal, q, k)
        if is_causal and mask is not None:
            self.spoilt = ~allowed.any(-1, keepdim=True) & super().allow(mask, False, q, k).any(-1, keepdim=True)
        return allowed

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores, allowed).masked_fill(self.spoilt, math.nan)


class ForgetsMemory(Correct):
    """Takes key and value that are one tensor for the input of self-attention."""

    only = "key and value one tensor"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Output:
        if key is value and key.shape == query.shape:
            query = key
        return super().forward(query, key, value, mask, is_causal)


class CausalMaskOfFirstCall(Correct):
    """Keeps the joined mask of the first causal call for later ones of the same shape."""

    only = "a second call, causal"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        allowed = super().allow(mask, is_causal, q, k)
        if is_causal:
            self.kept = getattr(self, "kept", {})
            allowed = self.kept.setdefault(allowed.shape, allowed)
        return allowed


class HeadMaskIgnoredWithoutQueries(Correct):
    """A mask (B or 1, H, 1, S) is not looked at."""

    only = "a mask (B, H, 1, S)"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        ignored = mask is not None and mask.ndim == 4 and mask.shape[1] > 1 and mask.shape[2] == 1 < q.shape[2]
        return super().allow(None if ignored else mask, is_causal, q, k)


class ScalesQueryInPlace(Correct):
    """The query is scaled in place."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Output:
        return super().forward(query.mul_(1.0), key, value, mask, is_causal)


class RefusesHeadsOfWidthOne(Correct):
    """Heads of width 1 are refused."""

    only = "d_k = 1, H > 2"

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, bias)
        if d_model == n_heads > 2:
            raise ValueError(f"d_model ({d_model}) must be larger than n_heads ({n_heads})")
