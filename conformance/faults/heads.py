"""Faults that HED must catch: projections, and how heads are split and joined."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.base import OWN_HEAD_DIM, Complete, Correct
from mha.conformance.faults.families import bias_missing, scores_scaled
from mha.conformance.faults.fault import fault
from mha.spec import Output


@fault(
    "HED-1",
    caught_by="result_is_that_of_the_loop_over_heads",
    source="https://github.com/reczoo/FuxiCTR/issues/30",
)
class HeadsByViewAlone(Correct):
    """`view` to (B, H, L, d_k) without the transpose."""

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], self.config.n_heads, x.shape[1], self.config.head_dim)


@fault("HED-1")
class HeadsReversed(Correct):
    """The heads are concatenated in reverse order."""

    def merge(self, x: Tensor) -> Tensor:
        return super().merge(x.flip(1))


@fault(
    "HED-1",
    caught_by="heads_of_their_own_width_match_the_loop",
    claims=OWN_HEAD_DIM,
    trigger="d_head is given",
)
class ScaledByDivision(Complete):
    """The scale is that of d_model / n_heads, whatever the width of a head is."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / (self.config.d_model / self.config.n_heads) ** 0.5


@fault("HED-1", source="https://github.com/Kyubyong/transformer/issues/117")
class OutputNotProjected(Complete):
    """There is no output projection."""

    def project(self, x: Tensor, role: str) -> Tensor:
        if role == "o":
            return x * 1.0
        return super().project(x, role)


@fault("HED-1")
class OutputProjectedTransposed(Complete):
    """The output projection is transposed."""

    def project(self, x: Tensor, role: str) -> Tensor:
        if role == "o":
            return F.linear(x, self.w_o.mT, getattr(self, "b_o", None))
        return super().project(x, role)


@fault("HED-1")
class OutputProjectedPerHead(Complete):
    """Each head is projected by the same part of W_o."""

    def merge(self, x: Tensor) -> Tensor:
        return F.pad(
            super().merge(x.sum(1, keepdim=True)), (0, self.config.d_model - self.config.head_dim)
        )


@fault("HED-1", source="https://github.com/sbryngelson/ANEForge/pull/253")
class QueryBiasDropped(bias_missing("q")):
    """The query bias is missing."""


@fault("HED-1")
class ValueBiasDropped(bias_missing("v")):
    """The value bias is missing."""


@fault("HED-1")
class OutputBiasDropped(bias_missing("o")):
    """The output bias is missing."""


@fault("HED-1", source="https://github.com/sgl-project/sglang/issues/40127")
class HeadsInterleaved(Complete):
    """A head's columns are `(d h)` instead of `(h d)`."""

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.head_dim, -1)).permute(0, 3, 1, 2)

    def merge(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).flatten(2)


@fault("HED-1")
class OneHeadLeftOut(Complete):
    """With several heads, the last one is left out."""

    def merge(self, x: Tensor) -> Tensor:
        return super().merge(torch.cat([x[:, :-1], x[:, -1:] * (x.shape[1] == 1)], 1))


@fault("HED-1")
class ValuesSplitByViewAlone(Complete):
    """The values are split into heads without the transpose."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return super().combine(weights, v.transpose(1, 2).reshape(v.shape), allowed)


@fault("HED-1", trigger="H > 8")
class ManyHeads(Complete):
    """Heads after the eighth repeat the first ones."""

    def merge(self, x: Tensor) -> Tensor:
        return super().merge(x[:, torch.arange(x.shape[1]) % 8])


@fault("HED-1", trigger="H not a power of two")
class ThreeHeads(
    scores_scaled(0.9, when=lambda module: module.config.n_heads & (module.config.n_heads - 1) != 0)
):
    """The scale is incorrect if the number of heads is not a power of two."""


@fault("HED-1", trigger="d_k odd")
class OddWidth(Complete):
    """The last column of a head of odd width is left out of the scores."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        even = q.shape[-1] // 2 * 2 or 1
        return super().score(q[..., :even], k[..., :even])


@fault("HED-1", trigger="d_k = 1")
class WidthOne(Complete):
    """With d_k = 1 the scores are replaced by their signs."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        if self.config.head_dim > 1:
            return super().score(q, k)
        return super().score(q, k).sign()


@fault("HED-2", source="https://github.com/BobMcDear/attorch/issues/14")
class FirstHeadForAll(Correct):
    """The first head's weights are used for all."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores[:, :1].expand_as(scores), allowed)


@fault("HED-2")
class HeadsAveraged(Complete):
    """Each head's context is the average over all heads."""

    def merge(self, x: Tensor) -> Tensor:
        return super().merge(x.mean(1, keepdim=True).expand_as(x))


@fault("HED-3")
class FirstHeadLouder(Complete):
    """The first head's context is too large by 1%."""

    def merge(self, x: Tensor) -> Tensor:
        return super().merge(torch.cat([x[:, :1] * 1.01, x[:, 1:]], 1))


@fault("HED-4", trigger="H = 1", source="https://github.com/lucidrains/vit-pytorch/issues/335")
class OneHeadNotProjected(Complete):
    """With a single head there is no output projection."""

    def project(self, x: Tensor, role: str) -> Tensor:
        if role == "o" and self.config.n_heads == 1:
            return x.clone()
        return super().project(x, role)


@fault("HED-5")
class OutputClipped(Complete):
    """The output is clipped to [-1, 1]."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights, _ = super().attend(query, *rest)
        return Output(output.clamp(-1.0, 1.0), weights)
