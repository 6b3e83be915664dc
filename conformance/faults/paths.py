"""Faults that PTH must catch: modes, requested weights, and the extras of `Config`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.base import CLAIMS, Complete
from mha.conformance.faults.families import bias_missing, mask_ignored, scores_scaled
from mha.conformance.faults.fault import fault
from mha.spec import Config, Options, Output, Weights


@fault("PTH-1", trigger="weights requested, causal")
class WeightsUnderCausal(Complete):
    """The causal flag is ignored if weights are requested."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        is_causal = options.is_causal and not options.need_weights
        return super().attend(query, key, value, options.change(is_causal=is_causal))


@fault("PTH-1", trigger="weights requested")
class AnotherScaleWithWeights(Complete):
    """The output is scaled differently if weights are requested."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights, _ = super().attend(query, *rest)
        return Output(output * (1.0 if weights is None else 1.01), weights)


@fault("PTH-2", caught_by="modes_change_no_output", trigger="eval under no_grad")
class EvaluationWithoutGradient(
    scores_scaled(0.9, when=lambda module: not (module.training or torch.is_grad_enabled()))
):
    """The scale is different in evaluation without gradients."""


@fault("PTH-2", caught_by="modes_change_no_output", trigger="inference_mode, with a mask")
class InferenceMode(mask_ignored(when=lambda q, options: torch.is_inference_mode_enabled())):
    """The mask is ignored in inference mode."""


@fault("PTH-2", caught_by="modes_change_no_output", trigger="no_grad")
class AnotherScaleWithoutGradient(
    scores_scaled(1.01, when=lambda module: not torch.is_grad_enabled())
):
    """The scale is different when gradients are off."""


@fault(
    "PTH-2",
    caught_by="modes_change_no_output_of_self_attention",
    trigger="self-attention, eval without gradients",
)
class FastPathOfSelfAttention(Complete):
    """The fused projection of self-attention uses W_k for the value."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        self.fast = query is key is value and not (self.training or torch.is_grad_enabled())
        return super().attend(query, key, value, *rest)

    def project(self, x: Tensor, role: str) -> Tensor:
        return super().project(x, "k" if role == "v" and self.fast else role)


@fault(
    "PTH-4", trigger="causal, with a mask", source="https://github.com/pytorch/pytorch/pull/178588"
)
class HintOverridesMask(mask_ignored(when=lambda q, options: options.is_causal)):
    """The causal flag overrides the mask."""


@fault("PTH-5", caught_by="extras_match_the_oracle", trigger="an extra key")
class KeyBiasDropped(bias_missing("k")):
    """The key bias is missing; without an extra key it cancels in the softmax."""


@fault("PTH-5", caught_by="empty_rows_attend_to_extra_keys", trigger="empty rows and an extra key")
class EmptyButForTheExtraKey(Complete):
    """A row whose own keys are all masked is zero, although it may attend to the extra key."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        own = allowed[..., : allowed.shape[-1] - self.config.extra_keys]
        return super().weigh(scores, allowed).masked_fill(~own.any(-1, keepdim=True), 0.0)


@fault("PTH-5", trigger="bias_kv, with a mask")
class ExtraKeyFirst(Complete):
    """The extra key is put before the others, and the mask is not shifted."""

    def extend(self, x: Tensor, name: str) -> Tensor:
        return super().extend(x, name).roll(int(self.config.bias_kv), 2)


@fault("PTH-5", caught_by="extras_match_the_oracle", trigger="bias_kv with zero_key")
class ZeroKeyForExtraKey(Complete):
    """With both extra keys, the learned one is replaced by zeros."""

    def extend(self, x: Tensor, name: str) -> Tensor:
        both = self.config.bias_kv and self.config.zero_key
        if both:
            return F.pad(x, (0, 0, 0, 2))
        return super().extend(x, name)


@fault("PTH-5", trigger="length_first", source="https://github.com/IBM/TabFormer/pull/14")
class LengthFirstForgotten(Complete):
    """`length_first` is ignored."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(replace(config, length_first=False), weights)


@fault("PTH-5", trigger="inputs of two dimensions")
class PositionsAsItems(Complete):
    """Inputs of two dimensions are read as a batch of single positions."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Output:
        if query.ndim == 2:
            return Output(
                super().forward(*(x[:, None] for x in (query, key, value)), **options).output[:, 0]
            )
        return super().forward(query, key, value, **options)


@fault("PTH-5", caught_by="extra_keys_have_gradients")
class ExtraKeyDetached(Complete):
    """The extra key has no gradient."""

    def extend(self, x: Tensor, name: str) -> Tensor:
        extended = super().extend(x, name)
        return torch.cat([extended[:, :, : x.shape[2]], extended[:, :, x.shape[2] :].detach()], 2)


@fault("PTH-5", caught_by="extras_match_the_oracle", trigger="zero_key, with a mask")
class ZeroKeyMasked(Complete):
    """The zero key is masked."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if self.config.zero_key:
            allowed = torch.cat([allowed[..., :-1], torch.zeros_like(allowed[..., -1:])], -1)
        return super().weigh(scores, allowed)


@fault("PTH-5", caught_by="other_layouts_have_gradients", trigger="length_first, backwards")
class LengthFirstDetached(Complete):
    """With the length first, the keys have no gradient."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k.detach() if self.config.length_first else k)


@fault("PTH-3", claims=replace(CLAIMS, masks={"bool", "float", "int"}), trigger="a mask of int32")
class ShortIntegersReversed(Complete):
    """Integers are claimed to count as booleans, 1 = may attend, but int32 ones are read the other
    way round.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        mask = options.mask
        if mask is not None and not mask.is_floating_point():
            mask = mask == 0 if mask.dtype == torch.int32 else mask != 0
        return super().attend(query, key, value, options.change(mask=mask))
