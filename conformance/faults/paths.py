"""Attention that is wrong on one path, with one option or for one size; see `gallery`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.complete import Complete
from mha.spec import Config, Output, Weights


class AnotherScaleWithWeights(Complete):
    """Another scale if weights are asked for."""

    only = "weights asked for"

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights = super().attend(query, *rest)
        return Output(output * (1.0 if weights is None else 1.01), weights)


class AnotherScaleWithoutGradient(Complete):
    """Another scale where gradients are off."""

    only = "no_grad"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * (1.0 if torch.is_grad_enabled() else 1.01)


class NanForEmptyRowsInFastPath(Complete):
    """As torch's fast path of 2.13 has it."""

    only = "an empty row, eval without gradients"
    source = "https://github.com/pytorch/pytorch/pull/190486"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        empty = ~allowed.any(-1, keepdim=True)
        fast = not (self.training or torch.is_grad_enabled())
        return super().weigh(scores, allowed).masked_fill(empty & fast, math.nan)


class FastPathOfSelfAttention(Complete):
    """One product for the three projections, in which the key's weights stand for the value's."""

    only = "self-attention, eval without gradients"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        self.fast = query is key is value and not (self.training or torch.is_grad_enabled())
        return super().attend(query, key, value, *rest)

    def project(self, x: Tensor, role: str) -> Tensor:
        return super().project(x, "k" if role == "v" and self.fast else role)


class HintOverridesMask(Complete):
    """The causal flag overrides the mask."""

    only = "causal, with a mask"
    source = "https://github.com/pytorch/pytorch/pull/178588"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(None if is_causal else mask, is_causal, q, k)


class ZeroKeyMasked(Complete):
    """The added zero key is masked."""

    only = "zero_key, with a mask"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if self.config.zero_key:
            allowed = torch.cat([allowed[..., :-1], torch.zeros_like(allowed[..., -1:])], -1)
        return super().weigh(scores, allowed)


class ZeroKeyForExtraKey(Complete):
    """With both, there is room for one: the zero key stands where the learned one should."""

    only = "bias_kv with zero_key"

    def extend(self, x: Tensor, name: str) -> Tensor:
        both = self.config.bias_kv and self.config.zero_key
        return F.pad(x, (0, 0, 0, 2)) if both else super().extend(x, name)


class ExtraKeyFirst(Complete):
    """The extra key stands before the others, and the mask where it stood."""

    only = "bias_kv, with a mask"

    def extend(self, x: Tensor, name: str) -> Tensor:
        return super().extend(x, name).roll(int(self.config.bias_kv), 2)


class LengthFirstForgotten(Complete):
    """`length_first` is ignored."""

    only = "length_first"
    source = "https://github.com/IBM/TabFormer/pull/14"

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(replace(config, length_first=False), weights)


class PositionsAsItems(Complete):
    """Inputs of two dimensions are taken for a batch of single positions."""

    only = "inputs of two dimensions"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Output:
        if query.ndim == 2:
            return Output(super().forward(*(x[:, None] for x in (query, key, value)), **options).output[:, 0])
        return super().forward(query, key, value, **options)


class RefusalSaysNothing(Complete):
    """An impossible configuration is refused without the numbers."""

    source = "https://github.com/pytorch/pytorch/pull/133169"

    def __init__(self, config: Config, weights: Weights) -> None:
        assert config.n_heads == 0 or config.d_model % config.n_heads == 0
        super().__init__(config, weights)


class DropoutUnchecked(Complete):
    """An impossible dropout is accepted."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(replace(config, dropout=0.0), weights)


class NegativeHeads(Complete):
    """A negative number of heads is taken for a positive one."""

    only = "n_heads < 0"

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(replace(config, n_heads=abs(config.n_heads)), weights)


class BiasAllTheSame(Complete):
    """Instance without biases, it has one for the output all the same."""

    only = "bias=False"
    source = "https://github.com/pytorch/pytorch/issues/52257"

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        if not config.bias:
            self.b_o = torch.nn.Parameter(weights.w_o.new_zeros(config.d_model))


class NeedsKeys(Complete):
    """No keys at all raises."""

    only = "S = 0"
    source = "https://github.com/Dao-AILab/flash-attention/pull/2568"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores - scores.detach().amax(-1, keepdim=True), allowed)


class AverageOfWeights(Complete):
    """The weights returned are averaged over heads."""

    source = "https://github.com/facebookresearch/fairseq/issues/3365"

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights = super().attend(query, *rest)
        return Output(output, weights if weights is None else weights.mean(1))


class AlwaysDouble(Complete):
    """The result is float64, whatever came in."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights = super().attend(query, *rest)
        return Output(output.double(), weights)


class NanSwallowed(Complete):
    """NaN in query, key or value is taken for zero."""

    only = "NaN in the input"

    def split(self, x: Tensor) -> Tensor:
        return super().split(x).nan_to_num(nan=0.0)


class MaskedKeysReadAtZeroWeight(Complete):
    """The textbook's product: zero times NaN is NaN."""

    only = "NaN behind a mask"
    source = "https://github.com/pytorch/pytorch/issues/101967"

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return weights @ v


class AnyMaskAnotherScale(Complete):
    """With any mask, another scale."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any) -> Output:
        output, weights = super().attend(query, key, value, mask, *rest)
        return Output(output * (1.0 if mask is None else 1.01), weights)
