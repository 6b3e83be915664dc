"""Faults that CAU must catch: the causal flag, alone and with a mask."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.faults.base import CLAIMS, Complete, Correct
from mha.conformance.faults.families import mask_ignored
from mha.conformance.faults.fault import fault
from mha.spec import Options, causal_mask


@fault(
    "CAU-1",
    caught_by="later_positions_have_no_influence",
    source="https://github.com/octo-models/octo/issues/75",
)
@fault("CAU-2")
class CausalOffByOne(Correct):
    """A query may attend to the key after it."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        allowed = super().allow(options.change(is_causal=False), q, k)
        later = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(2)
        if options.is_causal:
            return allowed & ~later
        return allowed


@fault(
    "CAU-1",
    caught_by="later_positions_have_no_influence_beside_the_lowest_number",
    trigger="causal rows with padding only",
)
class LowestBesideLowest(Complete):
    """The causal flag adds the dtype's lowest number, as padding does: a row of padding attends to
    later keys too.
    """

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options, q, k)
        if options.mask is None or not options.mask.is_floating_point() or not options.is_causal:
            return allowed, bias
        own, _ = super().allow(options.change(is_causal=False), q, k)
        later = (
            own
            & ~causal_mask(q.shape[2], k.shape[2], "top_left", q.device)
            & allowed.any(-1, keepdim=True)
        )
        return allowed | later, bias.masked_fill(later, torch.finfo(q.dtype).min)


@fault("CAU-2", trigger="L > tile, causal")
class CausalTileOnDiagonal(Complete):
    """Tiles of 16 by 16 on the causal diagonal, except the first, are not masked at all."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options.change(is_causal=False), q, k)
        if options.is_causal:
            rows, columns = (
                torch.arange(n, device=q.device) // 16 for n in (q.shape[2], k.shape[2])
            )
            whole = (rows[:, None] == columns) & (rows[:, None] > 0)
            allowed = allowed & (causal_mask(q.shape[2], k.shape[2], "top_left", q.device) | whole)
        return allowed, bias


@fault("CAU-2", trigger="B = 1, causal")
class SingleItem(Complete):
    """A batch of one takes a path without the causal mask."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(options.change(is_causal=options.is_causal and q.shape[0] > 1), q, k)


@fault("CAU-2")
class CausalExcludesItself(Complete):
    """A query may not attend to the key at its own position, except the first."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if not options.is_causal:
            return super().allow(options, q, k)
        allowed, bias = super().allow(options.change(is_causal=False), q, k)
        before = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(-1)
        before[:1, :1] = True
        return allowed & before, bias


@fault("CAU-3", trigger="L != S, causal", source="https://github.com/ml-explore/mlx/issues/2835")
class CausalFromTheRight(Correct):
    """The causal diagonal is aligned bottom-right, although top-left is declared."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        allowed = super().allow(options.change(is_causal=False), q, k)
        if options.is_causal:
            return allowed & causal_mask(q.shape[2], k.shape[2], "bottom_right", q.device)
        return allowed


@fault("CAU-3", trigger="S > L, causal")
class CausalForMoreKeys(Complete):
    """The causal diagonal is shifted by one when there are more keys than queries."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if not options.is_causal or k.shape[2] <= q.shape[2]:
            return super().allow(options, q, k)
        allowed, bias = super().allow(options.change(is_causal=False), q, k)
        return allowed & q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1), bias


@fault(
    "CAU-3",
    claims=replace(CLAIMS, causal="bottom_right"),
    trigger="L != S, causal",
    source="https://github.com/NVIDIA/cutlass/issues/2336",
)
class CausalFromTheLeft(Complete):
    """The causal diagonal is aligned top-left, although bottom-right is declared."""


@fault(
    "CAU-3",
    trigger="L = 1, S > 1, causal",
    source="https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/sdpa_attention.py",
)
class OneQueryNotCausal(Complete):
    """A single query sees every key in a causal call, although top-left is declared."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(options.change(is_causal=options.is_causal and q.shape[2] > 1), q, k)


@fault(
    "CAU-4",
    trigger="causal, with a mask",
    source="https://github.com/huggingface/transformers/pull/41966",
)
class CausalForgottenBesideMask(Correct):
    """With a mask, the causal flag is ignored."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        return super().allow(
            options.change(is_causal=options.is_causal and options.mask is None), q, k
        )


@fault(
    "CAU-4",
    trigger="causal, with a mask",
    source="https://github.com/AI-Hypercomputer/maxtext/issues/878",
)
class PaddingForgottenUnderCausal(mask_ignored(when=lambda q, options: options.is_causal)):
    """With the causal flag, the mask is ignored."""


@fault("CAU-4", trigger="causal, with a mask")
class JoinedByEither(Complete):
    """Mask and causal flag are combined with `or` instead of `and`."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options.change(is_causal=False), q, k)
        if options.is_causal:
            triangle = causal_mask(q.shape[2], k.shape[2], "top_left", q.device)
            allowed = triangle.expand_as(allowed) if options.mask is None else allowed | triangle
        return allowed, bias


@fault("CAU-5", source="https://github.com/Dao-AILab/flash-attention/issues/1915")
class LaterGradientLeaks(Correct):
    """Later positions get a gradient, although they have no influence."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        smooth = scores.softmax(-1)
        return super().weigh(scores, allowed) + (smooth - smooth.detach())
