"""Faults that MSK-1 to MSK-7 must catch: what a mask excludes, and how it is broadcast."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.faults.base import CLAIMS, Complete, Correct
from mha.conformance.faults.families import mask_ignored
from mha.conformance.faults.fault import fault
from mha.implementations.formula import with_mask
from mha.spec import Options, Output


@fault(
    "MSK-1",
    caught_by="masked_keys_have_no_influence",
    source="https://github.com/lucidrains/halonet-pytorch/pull/6",
)
class PolarityReversed(Correct):
    """True is read as masked."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        return super().allow(with_mask(options, torch.Tensor.logical_not), q, k)


@fault("MSK-1", trigger="L > S, with a mask", source="https://github.com/ml-explore/mlx/pull/2967")
class MoreQueriesThanKeys(Complete):
    """Queries beyond the number of keys are not masked."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options, q, k)
        return allowed | (torch.arange(q.shape[2], device=q.device) >= k.shape[2])[:, None], bias


@fault("MSK-1", trigger="L = 1, with a mask")
class SingleQuery(mask_ignored(when=lambda q, options: q.shape[2] == 1)):
    """A single query takes the decoding path, which ignores the mask."""


@fault("MSK-1", source="https://github.com/NVIDIA/TransformerEngine/issues/1524")
class MaskIgnored(mask_ignored(when=lambda q, options: True)):
    """The mask is ignored."""


@fault("MSK-1", trigger="L = S, with a mask of keys")
class MaskOnQueries(Complete):
    """A key mask is added to whole rows, where it cancels in the softmax."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        mask = options.mask
        if mask is not None and mask.dtype == torch.bool and mask.shape[-2:] == (1, q.shape[2]):
            allowed, bias = super().allow(options.change(mask=None), q, k)
            return allowed, bias - 1e4 * ~mask.mT
        return super().allow(options, q, k)


@fault(
    "MSK-1", trigger="scores below -1e5", caught_by="masked_keys_have_no_influence_on_low_scores"
)
class FillAboveLowScores(Complete):
    """Masked scores are filled with -1e5, which is higher than the lowest scores that are not
    masked.
    """

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        filled = scores.masked_fill(~allowed, -1e5 if scores.dtype != torch.half else -math.inf)
        return filled.softmax(-1).masked_fill(~allowed.any(-1, keepdim=True), 0.0)


@fault("MSK-2", source="https://github.com/huggingface/transformers/issues/14859")
@fault("MSK-3")
@fault("EQV-6", caught_by="one_allowed_key_gives_its_value")
class ShortFill(Complete):
    """Masked scores are lowered by 20 instead of removed."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return (
            (scores - 20.0 * ~allowed).softmax(-1).masked_fill(~allowed.any(-1, keepdim=True), 0.0)
        )


@fault(
    "MSK-2",
    caught_by="masked_keys_add_nothing_to_the_context",
    claims=replace(CLAIMS, returns_weights=False),
)
class ShortFillWithoutWeights(ShortFill):
    """Masked scores are lowered by 20 instead of removed, and no weights are returned."""


@fault("MSK-2", caught_by="masked_weights_are_zero")
class MaskMultiplied(Complete):
    """Scores are multiplied by the mask, so that a masked one is 0 instead of excluded."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return (scores * allowed).softmax(-1)


@fault("MSK-2", trigger="S > tile, with a mask")
class MaskOfFirstTile(Complete):
    """The mask is applied to the first 16 keys only."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options, q, k)
        return allowed | (torch.arange(k.shape[2], device=k.device) >= 16), bias


@fault("MSK-3", source="https://github.com/abisee/pointer-generator/issues/88")
class RenormalisedWithEpsilon(Complete):
    """Masked after the softmax, and renormalised with 1e-6 added to the denominator."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        kept = scores.softmax(-1) * allowed
        return kept / (kept.sum(-1, keepdim=True) + 1e-6)


@fault("MSK-4")
class AnyMaskAnotherScale(Complete):
    """With any mask, the output is scaled differently."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        output, weights, _ = super().attend(query, key, value, options)
        return Output(output * (1.0 if options.mask is None else 1.01), weights)


@fault(
    "MSK-5", caught_by="mask_of_fewer_dimensions_is_broadcast", trigger="a mask of fewer dimensions"
)
class FlatMaskForgotten(Complete):
    """A mask of fewer than four dimensions is ignored."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(
            with_mask(options, lambda mask: mask if mask.ndim == 4 else None), q, k
        )


@fault("MSK-5", caught_by="broadcast_mask_equals_expanded", trigger="a mask (B, H, 1, S)")
class HeadMaskIgnoredWithoutQueries(Correct):
    """A mask (B or 1, H, 1, S) is ignored."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        mask = options.mask
        ignored = (
            mask is not None
            and mask.ndim == 4
            and mask.shape[1] > 1
            and mask.shape[2] == 1 < q.shape[2]
        )
        if ignored:
            options = options.change(mask=None)
        return super().allow(options, q, k)


@fault(
    "MSK-5",
    caught_by="broadcast_mask_equals_expanded",
    trigger="B = H",
    source="https://github.com/lucidrains/vit-pytorch/issues/71",
)
class BatchEqualsHeads(Complete):
    """A mask per item is broadcast over the heads when there are as many heads as items."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        mask = options.mask
        if mask is not None and mask.ndim == 4 and mask.shape[:2] == (q.shape[1], 1):
            options = options.change(mask=mask.transpose(0, 1))
        return super().allow(options, q, k)


@fault("MSK-6")
class MaskOfFirstItem(Correct):
    """The first item's mask is used for the whole batch."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        return super().allow(with_mask(options, lambda mask: mask[:1]), q, k)


@fault("MSK-6", trigger="a second call, causal")
class CausalMaskOfFirstCall(Correct):
    """The combined mask of the first causal call is reused for later calls of the same shape."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        allowed = super().allow(options, q, k)
        if options.is_causal:
            self.kept = getattr(self, "kept", {})
            allowed = self.kept.setdefault(allowed.shape, allowed)
        return allowed


@fault("MSK-6", trigger="L = S")
class QueriesEqualKeys(Complete):
    """The mask is transposed when there are as many queries as keys."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        mask = options.mask
        if mask is not None and mask.ndim >= 2 and mask.shape[-1] == mask.shape[-2]:
            options = options.change(mask=mask.mT)
        return super().allow(options, q, k)


@fault("MSK-6", trigger="the first item unpadded, another padded")
class FirstItemForAll(Complete):
    """If the first item has no padding, the whole batch is treated as unpadded."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        mask = options.mask
        if (
            mask is not None
            and mask.dtype == torch.bool
            and mask.ndim == 4
            and bool(mask[:1].all())
        ):
            options = options.change(mask=None)
        return super().allow(options, q, k)


@fault("MSK-6", trigger="B > 2, with a mask")
class ThreeItems(Complete):
    """The items after the second use its mask."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options, q, k)
        return allowed[torch.arange(len(allowed)).clamp(max=1)], bias


@fault("MSK-6")
class MaskOfFirstHead(Complete):
    """The first head's mask is used for all."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(
            with_mask(options, lambda mask: mask[:, :1] if mask.ndim == 4 else mask), q, k
        )


@fault("MSK-6")
class MaskOfFirstQuery(Complete):
    """The first query's mask is used for all."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(
            with_mask(options, lambda mask: mask[..., :1, :] if mask.ndim >= 2 else mask), q, k
        )


@fault("MSK-7")
class LastKeyNeverMasked(Correct):
    """The last key cannot be masked."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        allowed = super().allow(options, q, k).clone()
        if not options.is_causal:
            allowed[..., -1] = True
        return allowed


@fault("MSK-7", source="https://github.com/google/trax/issues/820")
class FirstKeyNeverMasked(Complete):
    """The first key cannot be masked."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(
            scores, allowed | (torch.arange(scores.shape[-1], device=scores.device) == 0)
        )


@fault("MSK-5", caught_by="broadcast_mask_equals_expanded", trigger="a mask (B, H, 1, S)")
class FirstHeadOfItems(Complete):
    """Of a mask (B, H, 1, S), the first head's is used for all."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        mask = options.mask
        if (
            mask is not None
            and mask.ndim == 4
            and min(mask.shape[:2]) > 1 == mask.shape[2] < q.shape[2]
        ):
            options = options.change(mask=mask[:, :1])
        return super().allow(options, q, k)
