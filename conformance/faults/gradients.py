"""Attention whose results are right and whose gradients are not; see `gallery`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mha.conformance.faults.complete import Complete
from mha.spec import Output


def hooked(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return x with its gradient changed."""
    if x.requires_grad:
        x.register_hook(change)
    return x


class DetachedKeys(Complete):
    """The keys are detached."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k.detach())


class DataInside(Complete):
    """`.data` inside the call cuts the gradient off."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores.data, allowed)


class GradientTooLarge(Complete):
    """The gradient is too large by one in a thousand."""

    factor = 1.001

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights = super().attend(query, *rest)
        return Output(hooked(output, lambda gradient: gradient * self.factor), weights)


class GradientFarTooLarge(GradientTooLarge):
    """The gradient is too large by one in twenty."""

    factor = 1.05


class MaskedKeysPulled(Complete):
    """The backward pass forgets the mask."""

    source = "https://github.com/Dao-AILab/flash-attention/issues/2424"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        smooth = scores.softmax(-1)
        return super().weigh(scores, allowed) + (smooth - smooth.detach())


class NanToNumber(Complete):
    """Right outputs; but the softmax of an empty row has the gradient NaN, and zero times NaN is NaN."""

    source = "https://github.com/pytorch/pytorch/pull/42323"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        mask = torch.zeros_like(scores).masked_fill(~allowed, -math.inf)
        return (scores + mask).softmax(-1).nan_to_num(nan=0.0)


class ValueAloneForgotten(Complete):
    """Nothing is recorded where the key needs no gradient."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        return super().attend(query, key, value if key.requires_grad else value.detach(), *rest)


class AnotherScaleWhenRecorded(Complete):
    """Another scale where gradients are recorded."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights = super().attend(query, *rest)
        return Output(output * (1.01 if query.requires_grad else 1.0), weights)


class MaskGradientDropped(Complete):
    """An additive mask has no gradient."""

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(None if mask is None else mask.detach(), is_causal, q, k)


class MaskGradientOfFirstHead(Complete):
    """A mask that is shared by the heads gets the gradient of the first alone."""

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(mask, is_causal, q, k)
        return allowed, torch.cat([bias[:, :1], bias[:, 1:].detach()], 1)


class GradientOfScoresShifted(Complete):
    """A row's gradients do not cancel, so that the key bias gets one."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(hooked(scores + 0.0, lambda gradient: gradient + 0.01), allowed)


class GradientUntold(Complete):
    """It says nothing of the gradient of the value's projection."""

    def weight_gradients(self) -> dict[str, Tensor]:
        return {name: gradient for name, gradient in super().weight_gradients().items() if name != "w_v"}


class NoneTold(Complete):
    """It claims to tell the gradients of its weights."""

    def __getattribute__(self, name: str) -> Any:
        if name == "weight_gradients":
            raise AttributeError(name)
        return super().__getattribute__(name)


class OutputWeightForgottenInHalf(Complete):
    """In half precision W_o has no gradient."""

    def project(self, x: Tensor, role: str) -> Tensor:
        if role == "o" and x.element_size() == 2:
            return super().project(x, role).detach() + 0 * x.sum()
        return super().project(x, role)


class WideHeadsDetached(Complete):
    """Wide heads have no gradient."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k.detach() if k.shape[-1] > 32 else k)


class LateKeysDetached(Complete):
    """Keys that stand late in a long row have no gradient."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, torch.cat([k[:, :, :600], k[:, :, 600:].detach()], 2))


class NothingDroppedInGradients(Complete):
    """The backward pass takes the weights as they were before dropout."""

    def drop(self, weights: Tensor) -> Tensor:
        self.whole = weights
        return super().drop(weights)

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        whole = super().combine(self.whole, v, allowed)
        return super().combine(weights, v, allowed).detach() + whole - whole.detach()


class GradientOfScoresNotDropped(Complete):
    """The backward pass of the softmax forgets what was dropped."""

    source = "https://github.com/aws-neuron/nki-samples/pull/81"

    def drop(self, weights: Tensor) -> Tensor:
        return super().drop(weights).detach() + weights - weights.detach()


class WeightsAloneForgotten(Complete):
    """Nothing is recorded where no input needs a gradient."""

    def project(self, x: Tensor, role: str) -> Tensor:
        return super().project(x, role) if x.requires_grad else super().project(x, role).detach()


class FrozenForgotten(Complete):
    """Queries have no gradient where their projection needs none."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q if self.w_q.requires_grad else q.detach(), k)


class WideHeadsDetachedInHalf(Complete):
    """The wide kernel for half precision has no backward pass."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return super().combine(weights, v.detach() if v.shape[-1] > 16 and v.element_size() == 2 else v, allowed)
