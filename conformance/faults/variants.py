"""Faults that GQA, XAT and VAL must catch: grouped heads, and keys and values of other widths."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.base import CALLED, Complete
from mha.conformance.faults.families import drops_in_evaluation
from mha.conformance.faults.fault import fault

# Those of a kernel.
WITH_VALUE_WIDTH = replace(
    CALLED, projections=False, weight_gradients=False, value_width=True, kv_widths=False
)


@fault(
    "GQA-1",
    caught_by="grouped_heads_equal_repeated_ones",
    source="https://github.com/onnx/onnx/pull/7274",
)
class GroupsTiled(Complete):
    """The key/value heads are tiled instead of repeated."""

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.config.n_heads // self.config.kv_heads, 1, 1)


@fault("GQA-1", caught_by="grouped_heads_have_gradients")
class GroupsDetached(Complete):
    """Keys and values that several heads share have no gradient."""

    def repeat(self, x: Tensor) -> Tensor:
        if x.shape[1] < self.config.n_heads:
            x = x.detach()
        return super().repeat(x)


@fault(
    "GQA-1",
    caught_by="grouped_heads_of_everyday_sizes_have_gradients",
    trigger="d_k > 16, grouped heads, backwards",
)
class WideGroupsNotSummed(Complete):
    """A key/value head wider than 16 gets the gradient of the last query head that shares it,
    instead of their sum.
    """

    def repeat(self, x: Tensor) -> Tensor:
        repeated, times = super().repeat(x), self.config.n_heads // self.config.kv_heads
        last = (
            torch.arange(self.config.n_heads, device=x.device)[:, None, None] % times == times - 1
        )
        if self.config.head_dim <= 16:
            return repeated
        return torch.where(last, repeated, repeated.detach())


@fault(
    "GQA-1",
    caught_by="grouped_heads_of_everyday_sizes_match_the_oracle",
    trigger="d_k > 16, grouped heads",
)
class GroupedWideCut(Complete):
    """With grouped heads, only the first 16 columns of a head enter the scores."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        if self.config.kv_heads == self.config.n_heads:
            return super().score(q, k)
        return q[..., :16] @ k[..., :16].mT / self.config.head_dim**0.5


@fault(
    "GQA-1",
    caught_by="grouped_heads_on_long_rows_match_the_oracle",
    trigger="grouped heads, S > 512",
)
class GroupsTiledInLongRows(Complete):
    """In long rows the key/value heads are tiled instead of repeated."""

    def repeat(self, x: Tensor) -> Tensor:
        times = self.config.n_heads // self.config.kv_heads
        if x.shape[2] > 512:
            return x.repeat(1, times, 1, 1)
        return super().repeat(x)


@fault("GQA-1", caught_by="grouped_heads_drop", trigger="grouped heads, dropout")
class GroupsNotDropped(Complete):
    """With grouped heads, nothing is dropped."""

    def drop(self, weights: Tensor) -> Tensor:
        if self.config.kv_heads < self.config.n_heads:
            return weights
        return super().drop(weights)


@fault(
    "GQA-1", caught_by="grouped_heads_drop_each_weight_alone", trigger="grouped heads and dropout"
)
class GroupsNotRescaled(Complete):
    """With grouped heads, the kept weights are not rescaled by 1 / (1 - p)."""

    def drop(self, weights: Tensor) -> Tensor:
        if self.config.kv_heads == self.config.n_heads or not self.training:
            return super().drop(weights)
        return weights * (torch.rand_like(weights) >= self.config.dropout)


@fault("GQA-1", caught_by="grouped_heads_drop", trigger="grouped heads and dropout")
class GroupsDroppedInEvaluation(
    drops_in_evaluation(when=lambda module: module.config.kv_heads < module.config.n_heads)
):
    """With grouped heads, dropout is active in evaluation too."""


@fault(
    "GQA-1",
    caught_by="one_module_with_grouped_heads_serves_all_its_life",
    script_shows=False,
    trigger="training with grouped heads after a call in inference mode",
)
class GroupsIndexedInInference(Complete):
    """The index that repeats the heads is made in the first call, even in inference mode."""

    index: Tensor | None = None

    def repeat(self, x: Tensor) -> Tensor:
        if self.config.kv_heads == self.config.n_heads:
            return x
        if self.index is None:
            self.index = torch.arange(self.config.n_heads) // (
                self.config.n_heads // self.config.kv_heads
            )
        return x[:, self.index]


@fault("XAT-1", caught_by="other_widths_match_the_oracle")
class WidthsExchanged(Complete):
    """If key and value have different widths, their projections are swapped."""

    def project(self, x: Tensor, role: str) -> Tensor:
        exchanged = {"k": "v", "v": "k"} if self.config.key_width != self.config.value_width else {}
        return super().project(x, exchanged.get(role, role))


@fault("XAT-1", caught_by="other_widths_match_the_oracle", trigger="kdim > d_model")
class WideKeyCut(Complete):
    """Key columns after the first d_model are ignored."""

    def project(self, x: Tensor, role: str) -> Tensor:
        if role == "k" and x.shape[-1] > self.config.d_model:
            return super().project(
                torch.cat([x[..., : self.config.d_model], x[..., self.config.d_model :] * 0], -1),
                role,
            )
        return super().project(x, role)


@fault("XAT-1", caught_by="other_widths_have_gradients", trigger="vdim < d_model")
class NarrowValueDetached(Complete):
    """A value of another width than d_model has no gradient."""

    def project(self, x: Tensor, role: str) -> Tensor:
        if role == "v" and x.shape[-1] != self.config.d_model:
            x = x.detach()
        return super().project(x, role)


@fault(
    "GQA-1",
    caught_by="grouped_heads_go_with_other_options",
    trigger="grouped heads and an extra key",
)
class ExtraKeyOfFirstGroup(Complete):
    """Beside grouped heads, all groups share the first one's extra key."""

    def extend(self, x: Tensor, name: str) -> Tensor:
        extended = super().extend(x, name)
        if not self.config.bias_kv or self.config.kv_heads == self.config.n_heads:
            return extended
        own, extra = extended.split([x.shape[2], extended.shape[2] - x.shape[2]], 2)
        return torch.cat([own, extra[:, :1].expand_as(extra)], 2)


@fault(
    "XAT-1",
    caught_by="other_widths_go_with_other_options",
    trigger="kdim other than d_model, and an extra key",
)
class ExtraKeyForgottenWithWidths(Complete):
    """With keys of another width, the learned extra key is zero."""

    def extend(self, x: Tensor, name: str) -> Tensor:
        extended = super().extend(x, name)
        if self.config.bias_kv and self.config.key_width != self.config.d_model:
            extended = torch.cat([x, torch.zeros_like(extended[:, :, x.shape[2] :])], 2)
        return extended


@fault(
    "VAL-1",
    claims=WITH_VALUE_WIDTH,
    caught_by="values_of_their_own_width_match_the_oracle",
    trigger="d_v > d_k",
)
class ContextsOfTheQuerysWidth(Complete):
    """Contexts have as many columns as queries; the others are zeros."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        missing = v.shape[-1] - self.config.head_dim
        if missing > 0:
            v = F.pad(v[..., :-missing], (0, missing))
        return super().combine(weights, v, allowed)


@fault(
    "VAL-1",
    claims=WITH_VALUE_WIDTH,
    caught_by="values_of_their_own_width_match_the_oracle",
    trigger="d_v != d_k",
)
class ScaledByTheValues(Complete):
    """Scores are divided by the root of the values' width."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * math.sqrt(self.config.head_dim / self.config.value_dim)


@fault(
    "VAL-1",
    claims=WITH_VALUE_WIDTH,
    caught_by="values_of_their_own_width_have_gradients",
    trigger="d_v > d_k, backwards",
    source="https://github.com/Dao-AILab/flash-attention/issues/2552",
)
class OtherColumnsDetached(Complete):
    """Columns of the values beyond the width of the keys get no gradient."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        width = self.config.head_dim
        return super().combine(
            weights, torch.cat([v[..., :width], v[..., width:].detach()], -1), allowed
        )


@fault(
    "VAL-1",
    claims=WITH_VALUE_WIDTH,
    caught_by="values_of_their_own_width_go_with_other_options",
    trigger="grouped heads, with values of a width of their own",
)
class OwnWidthTiled(Complete):
    """Values of a width of their own are tiled for grouped heads instead of repeated."""

    def repeat(self, x: Tensor) -> Tensor:
        config = self.config
        if config.d_value is None or x.shape[-1] == config.head_dim:
            return super().repeat(x)
        return x.repeat(1, config.n_heads // config.kv_heads, 1, 1)
