"""Faults that NUM must catch in sizes that few tests have: many heads, wide heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mha.conformance.faults.base import Complete
from mha.conformance.faults.fault import fault
from mha.spec import Options, Output


@fault(
    "NUM-1",
    caught_by="results_for_more_than_1024_heads_of_a_batch_are_within_the_bound",
    trigger="B * H > 256, a mask per item",
)
class MaskOf256Heads(Complete):
    """Items and heads are one dimension, of which the mask is read with an index of eight bits."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options, q, k)
        index = torch.arange(q.shape[0] * q.shape[1]) % 256
        allowed, bias = (x.flatten(0, 1)[index].unflatten(0, q.shape[:2]) for x in (allowed, bias))
        return allowed, bias


@fault(
    "NUM-1", caught_by="results_of_heads_wider_than_256_are_within_the_bound", trigger="d_k > 256"
)
class HeadRemainderOf256Dropped(Complete):
    """Only the first 256 columns of a head enter the scores."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q[..., :256] @ k[..., :256].mT / math.sqrt(q.shape[-1])


@fault(
    "NUM-1",
    caught_by="results_of_everyday_inference_are_within_the_bound",
    trigger="inference without mask or weights, L > 31, d_k > 8 and not a multiple of 8",
)
class ColumnsInEights(Complete):
    """The fast path for inference reads the columns of a head in eights, and no remainder."""

    fast = False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        plain = options.mask is None and not (
            options.need_weights or self.training or torch.is_grad_enabled()
        )
        self.fast = plain and query.shape[1] >= 32
        return super().attend(query, key, value, options)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        width = q.shape[-1]
        read = width // 8 * 8 if self.fast and width > 8 else width
        return q[..., :read] @ k[..., :read].mT / math.sqrt(width)


@fault(
    "NUM-1",
    caught_by="results_for_more_than_1024_heads_of_a_batch_are_within_the_bound",
    trigger="B > 32, a mask per item",
)
class MaskOf32Items(Complete):
    """The mask is read with an item index of five bits."""

    items = 32

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options, q, k)
        index = torch.arange(q.shape[0]) % self.items
        return allowed[index], bias[index]


@fault(
    "NUM-1",
    caught_by="results_for_more_than_1024_heads_of_a_batch_are_within_the_bound",
    trigger="B > 64, a mask per item",
)
class MaskOf64Items(MaskOf32Items):
    """The mask is read with an item index of six bits."""

    items = 64


@fault("NUM-1", caught_by="results_of_everyday_inference_are_within_the_bound", trigger="d_k = 128")
@fault("NUM-1", caught_by="results_of_everyday_sizes_are_within_the_bound", trigger="d_k = 128")
@fault("GRD-1", caught_by="gradients_of_everyday_sizes_are_within_the_bound", trigger="d_k = 128")
class WidthOf128(Complete):
    """The kernel for heads of width 128 leaves out their last 16 columns."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        width = q.shape[-1]
        read = width - 16 if width == 128 else width
        return q[..., :read] @ k[..., :read].mT / math.sqrt(width)


@fault("NUM-1", caught_by="results_of_each_width_of_heads_are_within_the_bound", trigger="d_k = 96")
@fault(
    "GRD-1", caught_by="gradients_of_each_width_of_heads_are_within_the_bound", trigger="d_k = 96"
)
class WidthOf96(Complete):
    """The kernel for heads of width 96 is that for 64, and leaves out their last 32 columns."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        width = q.shape[-1]
        read = 64 if width == 96 else width
        return q[..., :read] @ k[..., :read].mT / math.sqrt(width)


@fault(
    "NUM-1",
    caught_by="results_for_more_than_64_heads_are_within_the_bound",
    trigger="H > 64, a mask per head",
)
class MaskOf64Heads(Complete):
    """The mask is read with a head index of six bits."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options, q, k)
        index = torch.arange(q.shape[1]) % 64
        return allowed[:, index], bias[:, index]


@fault("NUM-5", caught_by="long_causal_calls_are_within_the_bound", trigger="causal, L > 2048")
class TriangleOf2048(Complete):
    """The causal mask is a buffer for 2048 positions; queries after these see every key."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options, q, k)
        after = (torch.arange(q.shape[2], device=q.device) >= 2048).unsqueeze(1)
        return allowed | after & super().allow(options.change(is_causal=False), q, k)[0], bias
