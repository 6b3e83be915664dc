"""Faults that MSK must catch: empty rows, NaN behind a mask, additive and invalid masks."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.faults.base import CLAIMS, Complete, Correct
from mha.conformance.faults.families import empty_rows_unguarded
from mha.conformance.faults.fault import fault
from mha.implementations.formula import with_mask
from mha.spec import Options, Output


@fault(
    "MSK-8",
    caught_by="empty_rows_follow_the_declared_policy",
    trigger="an empty row",
    source="https://github.com/NVIDIA/apex/issues/1390",
)
class FiniteFill(Correct):
    """Masked scores are filled with a finite number, so that an empty row attends to all keys."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.masked_fill(~allowed, -1e9).softmax(-1)


@fault("MSK-8", trigger="an empty row", source="https://github.com/pytorch/pytorch/issues/40932")
class NanInEmptyRow(Correct):
    """An empty row is NaN."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.masked_fill(~allowed, -math.inf).softmax(-1)


@fault(
    "MSK-8",
    caught_by="empty_rows_of_wide_heads_follow_the_declared_policy",
    trigger="an empty row, d_k > 64",
)
class EmptyRowOfWideHeads(Complete):
    """An empty row is NaN for heads wider than 64."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        wide = self.config.head_dim > 64
        fill = math.nan if wide else 0.0
        return super().weigh(scores, allowed).masked_fill(~allowed.any(-1, keepdim=True), fill)


@fault(
    "MSK-8",
    trigger="causal, with a mask, an empty row",
    source="https://github.com/pytorch/pytorch/pull/190486",
)
class EmptyUnderCausal(Correct):
    """A row that only the causal mask and the padding together leave empty is NaN."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        self.spoilt = q.new_zeros((), dtype=torch.bool)
        allowed = super().allow(options, q, k)
        if options.is_causal and options.mask is not None:
            own = super().allow(options.change(is_causal=False), q, k)
            self.spoilt = ~allowed.any(-1, keepdim=True) & own.any(-1, keepdim=True)
        return allowed

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores, allowed).masked_fill(self.spoilt, math.nan)


@fault(
    "MSK-8",
    caught_by="empty_rows_give_zeros",
    script_shows=False,
    claims=replace(CLAIMS, empty_row="uniform"),
    trigger="an empty row",
    source="https://github.com/keras-team/keras/pull/21149",
)
class FillThatRunsOver(Complete):
    """The fill is so low that nothing is left of the scores: an empty row gets the mean of the
    values.
    """

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return (
            scores + torch.zeros_like(scores).masked_fill(~allowed, torch.finfo(scores.dtype).min)
        ).softmax(-1)

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return weights @ v


@fault("MSK-8", trigger="S = 1, with a mask")
class SingleKey(Complete):
    """A single key has weight 1, masked or not."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores, allowed | (scores.shape[-1] == 1))


@fault(
    "MSK-8",
    caught_by="empty_rows_of_many_keys_follow_the_declared_policy",
    trigger="S > 512, an empty row",
)
class UnguardedLongRows(empty_rows_unguarded(when=lambda module, scores: scores.shape[-1] > 512)):
    """The softmax of long rows divides by a sum that is 0 where no key is allowed."""


@fault(
    "MSK-8",
    caught_by="empty_rows_follow_the_declared_policy",
    trigger="a float mask (B, 1, 1, S), an empty item",
)
class UnguardedPaddingOfNumbers(Complete):
    """An item with an additive mask of all -infinity gives NaN; one with a boolean mask of all
    False does not.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        mask = options.mask
        output, weights, _ = super().attend(query, key, value, options.change(mask=mask))
        if (
            mask is not None
            and mask.is_floating_point()
            and mask.ndim == 4
            and mask.shape[1:3] == (1, 1)
        ):
            output = output.masked_fill((mask == -math.inf).all(-1)[:, 0, :, None], math.nan)
        return Output(output, weights)


@fault(
    "MSK-8",
    caught_by="empty_rows_follow_the_declared_policy",
    trigger="d_k a multiple of 16, an empty row",
)
class FilledWhereFused(Complete):
    """For d_k a multiple of 16 the fill is a finite number: an empty row gets the mean of the
    values.
    """

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if self.config.head_dim % 16:
            return super().weigh(scores, allowed)
        return scores.masked_fill(~allowed, -1e9).softmax(-1)


@fault("MSK-8", caught_by="dropout_leaves_empty_rows_as_they_are", trigger="dropout, an empty row")
class UnguardedWithDropout(
    empty_rows_unguarded(when=lambda module, scores: module.training and module.config.dropout > 0)
):
    """The softmax that is followed by dropout has no guard for rows without a key."""


@fault(
    "MSK-8",
    caught_by="empty_rows_follow_the_declared_policy",
    trigger="an empty row, eval without gradients",
    source="https://github.com/pytorch/pytorch/pull/190486",
)
class NanForEmptyRowsInFastPath(Complete):
    """An empty row is NaN in evaluation without gradients, as in the fast path of torch 2.13."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        empty = ~allowed.any(-1, keepdim=True)
        fast = not (self.training or torch.is_grad_enabled())
        return super().weigh(scores, allowed).masked_fill(empty & fast, math.nan)


@fault("MSK-9", caught_by="empty_rows_leave_other_rows_alone", trigger="an empty row")
class EmptyRowSpoilsBatch(Complete):
    """A row with no allowed key makes the last row of the batch NaN."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        weights = super().weigh(scores, allowed)
        spoilt = torch.zeros_like(allowed)
        if weights.numel():
            spoilt[-1, -1, -1] = (~allowed.any(-1)).any()
        return weights.masked_fill(spoilt, math.nan)


@fault(
    "MSK-9",
    caught_by="empty_rows_leave_other_gradients_alone",
    trigger="an empty row, with gradients",
)
class EmptyRowsHaveGradients(Complete):
    """An empty row's context is zero, but its gradient is not."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        empty = ~allowed.any(-1, keepdim=True)
        smooth = scores.softmax(-1) * empty
        return super().weigh(scores, allowed) + (smooth - smooth.detach())


@fault(
    "MSK-9",
    caught_by="empty_rows_leave_other_gradients_alone",
    source="https://github.com/pytorch/pytorch/pull/42323",
)
@fault("GRD-4")
class NanToNumber(Complete):
    """The outputs are correct, but the softmax of an empty row has NaN as its gradient, and zero
    times NaN is NaN.
    """

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        mask = torch.zeros_like(scores).masked_fill(~allowed, -math.inf)
        return (scores + mask).softmax(-1).nan_to_num(nan=0.0)


@fault(
    "MSK-10", trigger="NaN behind a mask", source="https://github.com/pytorch/pytorch/issues/101967"
)
class MaskedKeysReadAtZeroWeight(Complete):
    """The textbook formula: a masked key has weight zero, and zero times NaN is NaN."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return weights @ v


@fault("MSK-13", caught_by="nan_of_the_only_allowed_key_shows", trigger="NaN in the only key")
class RowOfNanIsEmpty(Complete):
    """A row whose scores are all NaN is taken for one without an allowed key."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        hidden = scores.isnan().all(-1, keepdim=True)
        return super().weigh(scores.masked_fill(hidden, 0.0), allowed & ~hidden)


@fault("MSK-13", caught_by="nan_of_allowed_keys_shows", trigger="NaN in the input")
class NanSwallowed(Complete):
    """NaN in query, key or value is read as zero."""

    def split(self, x: Tensor) -> Tensor:
        return super().split(x).nan_to_num(nan=0.0)


@fault(
    "MSK-11",
    caught_by="additive_and_boolean_masks_agree",
    trigger="a float mask",
    source="https://github.com/huggingface/transformers/pull/38094",
)
@fault("PTH-3")
class FloatMaskAsBoolean(Complete):
    """A float mask is read as a boolean one."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(with_mask(options, torch.Tensor.bool), q, k)


@fault(
    "MSK-11",
    caught_by="additive_mask_is_a_bias_on_the_scores",
    trigger="a float mask with finite values",
    source="https://github.com/pytorch/pytorch/issues/107084",
)
class FiniteMaskForgotten(Complete):
    """A float mask only excludes keys: its finite values are ignored."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options, q, k)
        return allowed, bias * 0


@fault(
    "MSK-11",
    caught_by="the_lowest_number_is_not_infinity",
    trigger="the lowest number in a float mask",
)
class LowestNumberAsInfinity(Complete):
    """The dtype's lowest number in a mask is read as -infinity."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        mask = options.mask
        if mask is not None and mask.is_floating_point():
            mask = mask.masked_fill(mask == torch.finfo(mask.dtype).min, -math.inf)
        return super().attend(query, key, value, options.change(mask=mask))


@fault("MSK-11", caught_by="additive_mask_is_a_bias_on_the_scores", trigger="a float mask, d_k > 1")
class FloatMaskScaled(Complete):
    """A float mask is added before the scores are scaled."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options, q, k)
        return allowed, bias / math.sqrt(self.config.head_dim)


class SoftmaxOfInfinity(Complete):
    """A row without a key is NaN, as the softmax gives it."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.masked_fill(~allowed, -math.inf).softmax(-1)


@fault(
    "MSK-9",
    caught_by="empty_rows_leave_other_rows_alone",
    claims=replace(CLAIMS, empty_row="nan"),
    trigger="an empty row",
)
class NanSpoilsItem(SoftmaxOfInfinity):
    """A row that is NaN makes all rows of its item NaN."""

    def merge(self, contexts: Tensor) -> Tensor:
        merged = super().merge(contexts)
        return merged + 0.0 * merged.sum(1, keepdim=True)


@fault(
    "MSK-9",
    caught_by="rows_of_nan_leave_other_gradients_alone",
    claims=replace(CLAIMS, empty_row="nan"),
    trigger="an empty row, with gradients",
    source="https://github.com/pytorch/pytorch/issues/41508",
)
class NanInGradientsOfOthers(SoftmaxOfInfinity):
    """A row that is NaN makes the gradients of W_q and W_k NaN."""


@fault(
    "MSK-12",
    caught_by="masks_of_other_conventions_are_refused_or_read_as_meant",
    trigger="a mask of shape (B, S)",
)
class PaddingOfTheFirstItem(Complete):
    """Of a mask of shape (B, S), the padding of the first item is that of all."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        mask = options.mask
        is_padding = mask is not None and mask.shape == (query.shape[0], key.shape[1])
        if mask is not None and is_padding:
            options = options.change(mask=mask[0])
        return super().attend(query, key, value, options)


@fault("MSK-12", caught_by="masks_of_a_wrong_shape_are_refused", trigger="a mask that is too large")
class MaskCropped(Complete):
    """A mask that is too large is cut to fit."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        mask = options.mask
        if mask is not None and mask.ndim >= 2:
            mask = mask[..., : query.shape[1], : key.shape[1]]
        return super().attend(query, key, value, options.change(mask=mask))


@fault("MSK-12", caught_by="masks_of_an_unclaimed_dtype_are_refused")
class IntegerMaskAdded(Complete):
    """A mask of integers, 1 = may attend, is added to the scores."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        mask = options.mask
        if mask is not None and not mask.is_floating_point():
            options = options.change(mask=mask + 0.0)
        return super().attend(query, key, value, options)


@fault(
    "MSK-14",
    caught_by="masks_of_another_precision_are_added_or_refused",
    trigger="a float mask in another dtype than the query",
)
class OtherPrecisionAsBoolean(Complete):
    """A float mask of another dtype than the query's is read as a boolean one."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        mask = options.mask
        if mask is not None and mask.is_floating_point() and mask.dtype != query.dtype:
            options = options.change(mask=mask.bool())
        return super().attend(query, key, value, options)


@fault("MSK-5", caught_by="mask_of_one_key_is_expanded_or_refused", trigger="a mask (1, H, 1, 1)")
class WholeHeadsUnmasked(Complete):
    """A mask of whole heads is ignored."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        mask = options.mask
        whole = mask is not None and mask.shape[-2:] == (1, 1) and mask.shape[1] > 1
        ignored = whole and min(q.shape[2], k.shape[2]) > 1
        if ignored:
            options = options.change(mask=None)
        return super().allow(options, q, k)


@fault("MSK-11", caught_by="the_lowest_number_is_not_infinity", trigger="-1e9 in a float mask")
class BillionAsInfinity(Complete):
    """-1e9 in a mask is read as -infinity."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if options.mask is not None and options.mask.is_floating_point():
            options = with_mask(options, lambda mask: mask.masked_fill(mask == -1e9, -math.inf))
        return super().allow(options, q, k)
