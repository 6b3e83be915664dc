"""Faults that SHP must catch: shapes, dtypes and memory layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mha.conformance.faults.base import Complete, Correct
from mha.conformance.faults.fault import fault
from mha.spec import Output


@fault("SHP-1", trigger="B = 1")
@fault("SHP-4")
class SqueezesBatchOfOne(Correct):
    """A batch of one loses its dimension."""

    def forward(
        self, query: Tensor, *rest: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Output:
        output, weights, _ = super().forward(query, *rest, mask=mask, is_causal=is_causal)
        return Output(output.squeeze(0), weights)


@fault("SHP-2", source="https://github.com/facebookresearch/fairseq/issues/3365")
class AverageOfWeights(Complete):
    """The returned weights are averaged over the heads."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights, _ = super().attend(query, *rest)
        return Output(output, weights if weights is None else weights.mean(1))


@fault("SHP-3")
class AlwaysDouble(Complete):
    """The result is float64, whatever the dtype of the inputs."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights, _ = super().attend(query, *rest)
        return Output(output.double(), weights)


@fault("SHP-5", trigger="S = 0", source="https://github.com/Dao-AILab/flash-attention/pull/2568")
class NeedsKeys(Complete):
    """An empty key sequence raises."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores - scores.detach().amax(-1, keepdim=True), allowed)


@fault(
    "SHP-8",
    caught_by="batches_that_disagree_are_refused",
    trigger="keys of one item, queries of several",
)
class BatchOfKeysBroadcast(Correct):
    """Keys of one item are broadcast to a larger batch."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Output:
        if key.shape[0] == value.shape[0] == 1:
            key, value = (x.expand(query.shape[0], -1, -1) for x in (key, value))
        return super().forward(query, key, value, mask, is_causal)


@fault(
    "SHP-6", caught_by="widths_and_lengths_that_disagree_are_refused", trigger="a value of length 1"
)
class ValueOfOneKeyBroadcast(Correct):
    """A value of length 1 is broadcast to all keys."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Output:
        if value.shape[1] == 1 < key.shape[1]:
            value = value.expand(-1, key.shape[1], -1)
        return super().forward(query, key, value, mask, is_causal)


@fault(
    "SHP-6",
    caught_by="widths_that_disagree_are_refused_with_the_length_first",
    trigger="the length first, and a value of length 1",
)
class LengthFirstValueBroadcast(Complete):
    """With the length first, a value of length 1 is broadcast to all keys."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        if self.config.length_first and value.shape[1] == 1 < key.shape[1]:
            value = value.expand(-1, key.shape[1], -1)
        return super().attend(query, key, value, *rest)


@fault(
    "SHP-8",
    caught_by="batches_that_disagree_are_refused_with_the_length_first",
    trigger="the length first, and a batch of one key and value",
)
class LengthFirstUnchecked(Complete):
    """With the length first, a key and value of one item are broadcast to the batch."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        if self.config.length_first:
            key, value = (x.expand(len(query), -1, -1) if len(x) == 1 else x for x in (key, value))
        return super().attend(query, key, value, *rest)


@fault(
    "SHP-7",
    caught_by="layout_does_not_matter",
    trigger="inputs that are not contiguous",
    source="https://github.com/Dao-AILab/flash-attention/pull/2670",
)
class ReadsMemoryAsDense(Correct):
    """The input's memory is read as if it were dense."""

    def forward(
        self, query: Tensor, *rest: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Output:
        return super().forward(
            query.as_strided(query.shape, torch.empty(query.shape).stride()), *rest, mask, is_causal
        )


@fault(
    "SHP-7",
    caught_by="every_layout_is_accepted",
    trigger="inputs that are not contiguous",
    source="https://github.com/facebookresearch/fairseq/issues/2598",
)
class ViewOfStrided(Complete):
    """`view` is called on a tensor that may not be contiguous."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        if query.numel():
            query = query.view(-1).view(query.shape)
        return super().attend(query, *rest)


@fault(
    "SHP-7",
    caught_by="layout_does_not_matter",
    trigger="an expanded batch",
    source="https://github.com/pytorch/pytorch/pull/128816",
)
class StrideZeroReadAsDense(Complete):
    """An expanded key is read as if each item had its own memory."""

    def attend(self, query: Tensor, key: Tensor, *rest: Any) -> Output:
        if key.ndim == 3 and 0 in key.stride() and key.numel():
            key = torch.cat([key[:1], key[1:] * 0])
        return super().attend(query, key, *rest)


@fault(
    "SHP-7",
    caught_by="layout_does_not_matter",
    trigger="a storage offset",
    source="https://github.com/torch-spyre/torch-spyre/issues/2906",
)
class OffsetIgnored(Complete):
    """The value is read from the start of its storage."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        if value.storage_offset():
            value = value.as_strided(value.shape, value.stride(), 0)
        return super().attend(query, key, value, *rest)


@fault(
    "SHP-7",
    caught_by="one_expanded_input_beside_dense_ones",
    trigger="a query expanded over the batch, keys that differ",
)
class ExpandedQueryAttendsOnce(Complete):
    """For a query expanded over the batch, only the first item's keys and values are read."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        if len(query) > 1 and query.stride(0) == 0:
            key, value = (x[:1].expand_as(x) for x in (key, value))
        return super().attend(query, key, value, *rest)
