"""Faults that NUM must catch: precision, tiles, sizes, and shortcuts for known inputs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.base import CLAIMS, Complete, Correct
from mha.conformance.faults.families import remainder_dropped
from mha.conformance.faults.fault import fault
from mha.spec import Options, Output, Rounding
from mha.spec.dtypes import in_tf32


@fault(
    "NUM-1",
    caught_by="results_are_within_the_bound",
    source="https://github.com/apple/axlearn/pull/18",
)
class SoftmaxInBfloat16(Complete):
    """The softmax is computed in bfloat16, inside a float32 path."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores.bfloat16(), allowed).to(scores)


@fault("NUM-1", source="https://github.com/huggingface/transformers/pull/33317")
class ScoresInHalf(Complete):
    """The scores are rounded to float16, inside a float32 path."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores.half().to(scores), allowed)


@fault("NUM-1", source="https://github.com/evintunador/triton_docs_tutorials/issues/6")
class ProductsInTF32(Complete):
    """Queries, keys, weights and values lose the last 13 of their 23 bits before they are
    multiplied.
    """

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(_in_tf32(q), _in_tf32(k))

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        largest = weights.amax(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        return super().combine(_in_tf32(weights / largest), _in_tf32(v), allowed) * largest


def _in_tf32(x: Tensor) -> Tensor:
    """Return numbers of float32 in TF32, with the gradient of the numbers."""
    cut = in_tf32(x.detach())
    if not x.requires_grad:
        return cut
    return x + (cut - x).detach()


@fault(
    "NUM-1",
    caught_by="results_are_within_the_bound_of_a_plain_softmax",
    claims=replace(CLAIMS, rounding=Rounding()),
    trigger="nothing is declared of the softmax",
    source="https://github.com/abisee/pointer-generator/issues/88",
)
class SmallEpsilon(Complete):
    """1e-6 is added to the sum of each row, where the largest term is 1."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        weights = super().weigh(scores, allowed)
        return weights / (1 + 1e-6 * weights.amax(-1, keepdim=True))


@fault(
    "NUM-1",
    caught_by="results_of_everyday_sizes_are_within_the_bound",
    trigger="d_k > 64",
    source="https://github.com/ROCm/aiter/pull/2273",
)
class SixtyFourColumns(Complete):
    """Only the first 64 columns of a head enter the scores."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q[..., :64] @ k[..., :64].mT / math.sqrt(self.config.head_dim)


@fault("NUM-1", trigger="S = tile + 1")
class DropsKeyAfterTile(Correct):
    """The key after a full tile is left out."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        whole = scores.shape[-1] // 16 * 16
        if 0 < whole < scores.shape[-1]:
            allowed = allowed & (torch.arange(scores.shape[-1], device=scores.device) < whole)
        return super().weigh(scores, allowed)


@fault("NUM-1", caught_by="results_are_within_the_bound")
class Zeros(Complete):
    """The output is zero."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights, _ = super().attend(query, *rest)
        return Output(output * 0, weights if weights is None else weights * 0)


@fault(
    "NUM-1",
    caught_by="results_are_within_the_bound",
    trigger="S not a multiple of the tile",
    source="https://github.com/jax-ml/jax/issues/27224",
)
class TileRemainderDropped(remainder_dropped(16)):
    """Keys after the last whole tile of 16 are left out."""


@fault("NUM-1", caught_by="results_are_within_the_bound", trigger="S not a multiple of the tile")
class TileRemainderOf32Dropped(remainder_dropped(32)):
    """Keys after the last whole tile of 32 are left out."""


@fault("NUM-1", caught_by="results_are_within_the_bound", trigger="S not a multiple of the tile")
class TileRemainderOf64Dropped(remainder_dropped(64)):
    """Keys after the last whole tile of 64 are left out."""


@fault("NUM-1", trigger="S not a multiple of the tile")
class TileRemainderOf128Dropped(remainder_dropped(128)):
    """Keys after the last whole tile of 128 are left out."""


@fault(
    "NUM-1",
    caught_by="results_of_everyday_sizes_are_within_the_bound",
    trigger="head_dim > 128",
    source="https://github.com/triton-lang/triton/issues/621",
)
class HeadRemainderOf128Dropped(Complete):
    """Only the first 128 columns of a head enter the scores."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q[..., :128] @ k[..., :128].mT / math.sqrt(q.shape[-1])


@fault("NUM-1", caught_by="results_are_within_the_bound", trigger="L = tile + 1")
class QueryTileRepeated(Complete):
    """A single query after the last whole tile of 64 gets the result of the one before it."""

    def merge(self, x: Tensor) -> Tensor:
        if x.shape[2] % 64 == 1 and x.shape[2] > 1:
            x = torch.cat([x[:, :, :-1], x[:, :, -2:-1]], 2)
        return super().merge(x)


@fault(
    "NUM-1",
    dtype="float16",
    caught_by="results_are_within_the_bound",
    trigger="float16, large scores",
    source="https://github.com/PaddlePaddle/Paddle/pull/41933",
)
class HalfOverflows(Complete):
    """In float16 the scores are scaled after the product, which overflows."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        if q.dtype == torch.half:
            return q * 16 @ k.mT / 16 / math.sqrt(self.config.head_dim)
        return super().score(q, k)


@fault(
    "NUM-1",
    caught_by="results_are_within_the_bound",
    trigger="S > 128, except 512 and 1024",
    source="https://arxiv.org/abs/2509.14279",
)
class ShapesRecognised(Complete):
    """Correct for the sizes of a well-known benchmark and for up to 128 keys; otherwise only the
    first 128 are read.
    """

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        known = scores.shape[-1] in (512, 1024)
        return super().weigh(
            scores, allowed & (known | (torch.arange(scores.shape[-1], device=scores.device) < 128))
        )


@fault("NUM-1", script_shows=False, trigger="the twenty-first call of a process")
class TiresOfAll(Complete):
    """Only the first twenty calls of a process are correct."""

    calls: ClassVar[list[int]] = []

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        self.calls.append(1)
        return super().score(q, k) * (1.0 if len(self.calls) <= 20 else 1.1)


@fault(
    "NUM-1",
    caught_by="results_on_several_threads_are_within_the_bound",
    script_shows=False,
    trigger="several threads",
)
class RemainderOfThreads(Complete):
    """Each thread computes L // threads queries, and none the remainder."""

    def merge(self, x: Tensor) -> Tensor:
        done = x.shape[2] // torch.get_num_threads() * torch.get_num_threads()
        return super().merge(F.pad(x[:, :, :done], (0, 0, 0, x.shape[2] - done)))


@fault("NUM-1", caught_by="results_for_many_items_and_heads_are_within_the_bound", trigger="B > 8")
class MaskOfEightItems(Complete):
    """A batch is computed eight items at a time, always with the mask of the first eight."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if options.mask is not None and options.mask.ndim == 4 and options.mask.shape[0] > 8:
            options = options.change(mask=options.mask[torch.arange(options.mask.shape[0]) % 8])
        return super().allow(options, q, k)


@fault(
    "NUM-1",
    caught_by="results_for_many_items_and_heads_are_within_the_bound",
    trigger="H > 16, a mask per head",
)
class MaskOfSixteenHeads(Complete):
    """The mask is read with a head index of four bits."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if options.mask is not None and options.mask.ndim == 4 and options.mask.shape[1] > 16:
            options = options.change(mask=options.mask[:, torch.arange(options.mask.shape[1]) % 16])
        return super().allow(options, q, k)


@fault("NUM-2", dtype="float64", trigger="float64")
class ScaleInSinglePrecision(Correct):
    """sqrt(d_k) is rounded to float32."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / float(torch.tensor(self.config.head_dim).float().sqrt())


@fault(
    "NUM-3",
    dtype="bfloat16",
    caught_by="half_precision_is_no_worse_than_the_plain_formula",
    script_shows=False,
    trigger="half precision, long rows",
)
@fault(
    "NUM-3",
    dtype="bfloat16",
    caught_by="long_rows_in_half_precision_are_no_worse_than_the_plain_formula",
    script_shows=False,
)
@fault(
    "NUM-8",
    dtype="bfloat16",
    caught_by="errors_are_as_large_as_roundings_explain",
    script_shows=False,
)
class SummedOneByOne(Complete):
    """The denominator is accumulated in the dtype of the inputs, key by key."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        weights = super().weigh(scores, allowed)
        raised = (
            (scores - scores.masked_fill(~allowed, -math.inf).amax(-1, keepdim=True))
            .exp()
            .masked_fill(~allowed, 0)
        )
        total = torch.zeros_like(raised[..., 0])
        for key in range(raised.shape[-1]):
            total = total + raised[..., key]
        return torch.where(allowed, raised / total.unsqueeze(-1), weights)


@fault(
    "NUM-8",
    dtype="bfloat16",
    caught_by="errors_for_many_keys_are_as_large_as_roundings_explain",
    script_shows=False,
)
@fault(
    "NUM-3",
    dtype="bfloat16",
    caught_by="half_precision_is_no_worse_than_the_plain_formula",
    script_shows=False,
    trigger="bfloat16, many keys",
)
class HalfAccumulated(Complete):
    """In bfloat16 the context is accumulated key by key in bfloat16."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        if v.dtype != torch.bfloat16:
            return super().combine(weights, v, allowed)
        context = torch.zeros_like(weights[..., :1] * v[..., :1, :])
        for key in range(v.shape[2]):
            read = v[..., key, None, :].masked_fill(~allowed[..., key].any(2)[..., None, None], 0.0)
            context = context + weights[..., key, None] * read
        return context


@fault(
    "NUM-4",
    dtype="float16",
    trigger="float16, with a mask",
    source="https://github.com/facebookresearch/fairseq/issues/3575",
)
class FillThatDoesNotFit(Complete):
    """The fill value does not fit in float16."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if bool(allowed.all()):
            return super().weigh(scores, allowed)
        empty = ~allowed.any(-1, keepdim=True)
        return scores.masked_fill(~allowed, -1e9).softmax(-1).masked_fill(empty, 0.0)


@fault("NUM-6", caught_by="very_small_and_very_large_inputs")
class ValuesNormalised(Complete):
    """Values are divided by their maximum plus 1e-6 before the product, and multiplied by the
    maximum after it.
    """

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        largest = v.abs().amax((-2, -1), keepdim=True)
        return super().combine(weights, v / (largest + 1e-6), allowed) * largest


@fault(
    "NUM-6",
    dtype="float16",
    caught_by="numbers_at_the_end_of_the_range_are_not_clamped",
    trigger="scores beyond 1e4 in float16",
)
class ScoresClampedInHalf(Complete):
    """In float16 scores are clamped to 1e4, against infinities."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        if scores.dtype == torch.float16:
            return scores.clamp(-1e4, 1e4)
        return scores


@fault(
    "NUM-6",
    dtype="float16",
    caught_by="numbers_at_the_end_of_the_range_are_not_clamped",
    trigger="outputs beyond 3e4 in float16",
)
class OutputClampedInHalf(Complete):
    """In float16 outputs are clamped to 3e4, against infinities."""

    def project(self, x: Tensor, role: str) -> Tensor:
        projected = super().project(x, role)
        if role == "o" and x.dtype == torch.float16:
            return projected.clamp(-3e4, 3e4)
        return projected
