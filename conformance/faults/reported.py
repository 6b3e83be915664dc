"""Faults from public reports on kernels, which WIN, LSE, GQA, HED and GRD must catch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mha.conformance.faults.base import Complete
from mha.conformance.faults.families import hooked
from mha.conformance.faults.fault import fault
from mha.conformance.faults.lse import OF_SCORES, WITH_LSE
from mha.conformance.faults.windows import EXACT, Allowed
from mha.conformance.harness.known_bad.options import moved
from mha.spec import Options


@fault(
    "WIN-1",
    caught_by=EXACT,
    trigger="a window, one query",
    source="https://github.com/sgl-project/sglang/pull/32087",
)
class WindowOfOneLessForOneQuery(Complete):
    """A single query, as in decoding, sees one key less of its window than a row of many."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        if options.window is not None and q.shape[2] == 1:
            options = options.change(window=moved(options.window, -1, 0))
        return super().allow(options, q, k)


@fault(
    "WIN-1",
    caught_by=EXACT,
    trigger="more queries than a window has keys",
    source="https://github.com/nntrainer/nntrainer/pull/3989",
)
class RowsPastTheWindowLeftOut(Complete):
    """Only as many rows are computed as the window has keys; the others are zeros."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        context = super().combine(weights, v, allowed)
        if self.options.window is None or None in self.options.window:
            return context
        left, right = self.options.window
        computed = torch.arange(context.shape[2], device=context.device) <= left + right
        return context.masked_fill(~computed.unsqueeze(-1), 0.0)


@fault(
    "LSE-1",
    claims=WITH_LSE,
    caught_by=OF_SCORES,
    trigger="a row without keys",
    source="https://github.com/vllm-project/vllm/pull/15492",
)
class LseOfNoKeysIsInfinity(Complete):
    """The log-sum-exp of a row without a key is +infinity, where -infinity is declared."""

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        lse = super().log_sum_exp(scores, allowed)
        return lse.masked_fill(~allowed.any(-1), math.inf)


@fault(
    "LSE-1",
    claims=WITH_LSE,
    caught_by=OF_SCORES,
    source="https://github.com/pytorch/pytorch/issues/181645",
)
class LseTimesLogTwo(Complete):
    """The natural log-sum-exp is converted from base 2, in which it is not."""

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().log_sum_exp(scores, allowed) * math.log(2)


@fault(
    "LSE-1",
    claims=WITH_LSE,
    caught_by=OF_SCORES,
    trigger="several heads and queries",
    source="https://github.com/vllm-project/vllm/pull/57012",
)
class LseOfTokensReadAsOfHeads(Complete):
    """The log-sum-exp lies token by token, and is returned as if it lay head by head."""

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        lse = super().log_sum_exp(scores, allowed)
        return lse.mT.reshape(lse.shape)


@fault(
    "LSE-3",
    claims=WITH_LSE,
    script_shows=False,
    trigger="a loss of the log-sum-exp, S not a multiple of 4",
    source="https://github.com/pytorch/pytorch/issues/136232",
)
class GradientOfLsePastTheLastTile(Complete):
    """The gradient of the log-sum-exp is NaN where the last tile of four keys is not full."""

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        lse = super().log_sum_exp(scores, allowed)
        if scores.shape[-1] % 4 == 0:
            return lse
        return hooked(lse, lambda gradient: gradient * math.nan)


@fault(
    "GQA-1",
    caught_by="grouped_heads_equal_repeated_ones",
    trigger="other numbers of heads in a group than of groups",
    source="https://github.com/HazyResearch/HipKittens/pull/22",
)
class GroupsOfAsManyAsGroups(Complete):
    """Head h reads key head h // H_kv, which is right only where a group has H_kv heads."""

    def repeat(self, x: Tensor) -> Tensor:
        groups = x.shape[1]
        if groups == self.config.n_heads:
            return x
        heads = torch.arange(self.config.n_heads, device=x.device)
        return x[:, (heads // groups).clamp(max=groups - 1)]


@fault(
    "HED-1",
    trigger="d_k of 16 or more",
    source="https://github.com/Dao-AILab/flash-attention/pull/2553",
)
class WideContextsStoredInAnotherOrder(Complete):
    """Pairs of columns of wide contexts are exchanged as they are stored; norms stay right."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        context = super().combine(weights, v, allowed)
        width = context.shape[-1]
        if width < 16 or width % 4:
            return context
        return context.unflatten(-1, (-1, 2, 2)).flip(-2).flatten(-3)


@fault(
    "GRD-1",
    trigger="a batch of 2 or more, d_k > 16, backwards",
    source="https://github.com/NVIDIA/TransformerEngine/issues/3216",
)
class QueryGradientOfLaterItems(Complete):
    """With wide heads, the query's gradients of items after the first are five times too large."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        if q.shape[-1] > 16:
            factor = torch.full((len(q), 1, 1, 1), 5.0, device=q.device, dtype=q.dtype)
            factor[:1] = 1.0
            q = hooked(q.clone(), lambda gradient: gradient * factor)
        return super().score(q, k)
