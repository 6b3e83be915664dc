"""Faults that GRD must catch: gradients of inputs, weights and masks, and what they need."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.base import OWN_HEAD_DIM, Complete
from mha.conformance.faults.families import hooked, keys_detached
from mha.conformance.faults.fault import fault
from mha.spec import Options, Output


@fault("GRD-1", caught_by="gradients_are_within_the_bound")
class NoGradInside(Complete):
    """The value is projected under `no_grad`."""

    def project(self, x: Tensor, role: str) -> Tensor:
        if role != "v":
            return super().project(x, role)
        with torch.no_grad():
            return super().project(x, role)


class _DenseBackward(torch.autograd.Function):
    """x W^T, whose backward pass reads x as if it were dense."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.contiguous(), weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        there = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        dense = x.as_strided(x.shape, x.new_empty(x.shape).stride()) if there >= x.numel() else x
        return gradient @ weight, torch.einsum("...i,...j->ij", gradient, dense)


@fault(
    "GRD-1",
    caught_by="gradients_are_within_the_bound",
    trigger="cross-attention, inputs that are not contiguous, backwards",
)
class BackwardReadsAsDense(Complete):
    """The key projection of cross-attention copies a strided input, but its backward pass reads the
    memory as dense.
    """

    cross = False

    def attend(self, query: Tensor, key: Tensor, *rest: Any) -> Output:
        self.cross = key is not query
        return super().attend(query, key, *rest)

    def project(self, x: Tensor, role: str) -> Tensor:
        if role != "k" or not self.cross or not torch.is_grad_enabled():
            return super().project(x, role)
        projected: Tensor = _DenseBackward.apply(x, self.w_k)
        if self.config.has_bias("k"):
            return projected + self.b_k
        return projected


@fault(
    "GRD-1",
    caught_by="heads_of_their_own_width_have_gradients",
    claims=OWN_HEAD_DIM,
    trigger="n_heads * d_head > d_model",
)
class WideContextCut(Complete):
    """The columns of W_o after the first d_model have no gradient."""

    def project(self, x: Tensor, role: str) -> Tensor:
        if role != "o":
            return super().project(x, role)
        width = self.config.d_model
        w_o = torch.cat([self.w_o[:, :width], self.w_o[:, width:].detach()], 1)
        return F.linear(x, w_o, getattr(self, "b_o", None))


@fault("GRD-1", caught_by="all_weight_gradients_are_reported", script_shows=False)
class GradientUntold(Complete):
    """`weight_gradients` leaves out the value projection."""

    def weight_gradients(self) -> dict[str, Tensor]:
        return {
            name: gradient for name, gradient in super().weight_gradients().items() if name != "w_v"
        }


@fault("GRD-1", caught_by="all_weight_gradients_are_reported")
class NoneTold(Complete):
    """Weight gradients are claimed, but there is no `weight_gradients`."""

    def __getattribute__(self, name: str) -> Any:
        if name == "weight_gradients":
            raise AttributeError(name)
        return super().__getattribute__(name)


@fault("GRD-1", dtype="bfloat16", caught_by="half_gradients_are_within_the_bound")
class OutputWeightForgottenInHalf(Complete):
    """In half precision W_o has no gradient."""

    def project(self, x: Tensor, role: str) -> Tensor:
        if role == "o" and x.element_size() == 2:
            return super().project(x, role).detach() + 0 * x.sum()
        return super().project(x, role)


@fault("GRD-1", caught_by="gradients_of_everyday_sizes_are_within_the_bound")
class WideHeadsDetached(keys_detached(when=lambda k: k.shape[-1] > 32)):
    """With heads wider than 32, the keys have no gradient."""


@fault("GRD-1", caught_by="long_rows_have_gradients")
class LateKeysDetached(Complete):
    """Keys after the 600th have no gradient."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, torch.cat([k[:, :, :600], k[:, :, 600:].detach()], 2))


@fault("GRD-1", caught_by="gradients_drop_what_the_outputs_dropped", script_shows=False)
class NothingDroppedInGradients(Complete):
    """The backward pass uses the weights before dropout."""

    def drop(self, weights: Tensor) -> Tensor:
        self.whole = weights
        return super().drop(weights)

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        whole = super().combine(self.whole, v, allowed)
        return super().combine(weights, v, allowed).detach() + whole - whole.detach()


@fault("GRD-1", caught_by="gradients_are_within_the_bound")
@fault("GRD-2", dtype="float64", script_shows=False)
class DetachedKeys(keys_detached(when=lambda k: True)):
    """The keys are detached."""


@fault("GRD-1", caught_by="gradients_are_within_the_bound")
class DataInside(Complete):
    """`.data` inside the call cuts the gradient off."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores.data, allowed)


@fault("GRD-1", dtype="float64", caught_by="gradients_are_within_the_bound")
@fault("GRD-1", caught_by="gradients_are_within_the_bound")
class GradientTooLarge(Complete):
    """The gradient is too large by 0.1%."""

    factor = 1.001

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights, _ = super().attend(query, *rest)
        return Output(hooked(output, lambda gradient: gradient * self.factor), weights)


@fault(
    "GRD-1",
    dtype="bfloat16",
    caught_by="half_gradients_are_no_worse_than_plain",
    script_shows=False,
)
@fault("GRD-2", dtype="float64", script_shows=False)
class GradientFarTooLarge(GradientTooLarge):
    """The gradient is too large by 5%."""

    factor = 1.05


@fault("GRD-1", dtype="bfloat16", caught_by="half_gradients_of_everyday_sizes_are_within_the_bound")
class WideHeadsDetachedInHalf(Complete):
    """The wide kernel for half precision has no backward pass."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        if v.shape[-1] > 16 and v.element_size() == 2:
            v = v.detach()
        return super().combine(weights, v, allowed)


@fault(
    "GRD-1",
    caught_by="many_queries_on_many_keys_have_gradients",
    trigger="gradients, L and S > 512",
)
@fault(
    "GRD-8",
    dtype="bfloat16",
    caught_by="errors_of_gradients_for_many_keys_do_not_add_up_to_a_defect",
    trigger="half precision, gradients, L and S > 512",
)
class BackwardOfTooFewBlocks(Complete):
    """The backward pass covers as many blocks of 512 by 512 as the longer side has, not all."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        if scores.requires_grad and min(scores.shape[-2:]) > 512:
            rows, columns = (-(-size // 512) for size in scores.shape[-2:])
            done = (torch.arange(rows * columns, device=scores.device) < max(rows, columns)).view(
                rows, columns
            )
            done = done.repeat_interleave(512, 0).repeat_interleave(512, 1)[
                : scores.shape[-2], : scores.shape[-1]
            ]
            scores.register_hook(lambda gradient: gradient * done)
        return scores


class _OutputProjection(torch.autograd.Function):
    """x W^T, with the gradient of W computed for another x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(weight, other)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight, other = ctx.saved_tensors
        return gradient @ weight, torch.einsum("...i,...j->ij", gradient, other), None


@fault(
    "GRD-1",
    caught_by="gradients_drop_what_the_outputs_dropped",
    script_shows=False,
    trigger="training with dropout",
)
class RecomputedWithoutDropout(Complete):
    """The contexts are recomputed for the gradient of W_o, from the weights before dropout."""

    undropped: Tensor

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        self.undropped = super().combine(self.kept, v, allowed).detach()
        return super().combine(weights, v, allowed)

    def drop(self, weights: Tensor) -> Tensor:
        self.kept = weights
        return super().drop(weights)

    def project(self, x: Tensor, role: str) -> Tensor:
        if role != "o" or not (self.training and self.config.dropout and torch.is_grad_enabled()):
            return super().project(x, role)
        output: Tensor = _OutputProjection.apply(x, self.w_o, self.merge(self.undropped))
        if self.config.has_bias("o"):
            return output + self.b_o
        return output


@fault(
    "GRD-2",
    dtype="float64",
    script_shows=False,
    source="https://github.com/aws-neuron/nki-samples/pull/81",
)
class GradientOfScoresNotDropped(Complete):
    """The backward pass of the softmax ignores dropout."""

    def drop(self, weights: Tensor) -> Tensor:
        return super().drop(weights).detach() + weights - weights.detach()


@fault("GRD-1", caught_by="gradients_of_scores_drop_what_the_outputs_dropped", script_shows=False)
@fault("GRD-2", dtype="float64", script_shows=False, trigger="dropout, S > 15")
class BackwardForgetsDropout(Complete):
    """The backward pass of long rows ignores dropout."""

    def drop(self, weights: Tensor) -> Tensor:
        dropped = super().drop(weights)
        if weights.shape[-1] < 16:
            return dropped
        return weights + (dropped - weights).detach()


@fault("GRD-3", source="https://github.com/Dao-AILab/flash-attention/issues/2424")
class MaskedKeysPulled(Complete):
    """The backward pass ignores the mask."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        smooth = scores.softmax(-1)
        return super().weigh(scores, allowed) + (smooth - smooth.detach())


@fault("GRD-6")
class MaskGradientDropped(Complete):
    """An additive mask has no gradient."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if options.mask is not None:
            options = options.change(mask=options.mask.detach())
        return super().allow(options, q, k)


@fault("GRD-6")
class MaskGradientOfFirstHead(Complete):
    """A mask that the heads share gets the gradient of the first head only."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options, q, k)
        return allowed, torch.cat([bias[:, :1], bias[:, 1:].detach()], 1)


@fault("GRD-7", caught_by="the_key_bias_has_no_gradient")
@fault("GRD-7", caught_by="the_gradients_of_a_row_sum_to_zero")
class GradientOfScoresShifted(Complete):
    """The gradients of a row's scores do not cancel, so that the key bias gets one."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(hooked(scores + 0.0, lambda gradient: gradient + 0.01), allowed)
