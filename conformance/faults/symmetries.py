"""Faults that EQV must catch: items, permutations, and exact results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mha.conformance.faults.base import Complete, Correct
from mha.conformance.faults.fault import fault
from mha.spec import Config, Output, Weights


@fault("EQV-1", caught_by="batch_size_does_not_matter", trigger="B > 1")
class DependsOnBatchSize(Correct):
    """The result depends on the size of the batch."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * (1.01 if q.shape[0] > 1 else 1.0)


@fault(
    "EQV-1",
    caught_by="other_items_have_no_influence",
    source="https://github.com/line/lighthouse/pull/77",
)
class ReadsOtherItems(Correct):
    """An item's result depends on the others."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k + 1e-6 * k.mean(0, keepdim=True))


@fault("EQV-2", trigger="a second call")
class RepeatsItself(Correct):
    """The last result is returned again for a query of the same shape."""

    last: Output | None = None

    def forward(
        self, query: Tensor, *rest: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Output:
        if self.last is None or self.last.output.shape != query.shape:
            self.last = super().forward(query, *rest, mask=mask, is_causal=is_causal)
        return self.last


@fault("EQV-2", trigger="a second call")
class ResultsByShape(Complete):
    """The weights of the first call are reused for every call of the same shape."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.kept: dict[Any, Tensor] = {}

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return self.kept.setdefault(scores.shape, super().weigh(scores, allowed))


@fault("EQV-3")
@fault("EQV-5", caught_by="zero_queries_give_the_mean")
class LaterKeysFavoured(Complete):
    """Later keys get slightly higher scores."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) + torch.arange(k.shape[2]).to(q) / 100


@fault("EQV-4")
class ValuesClipped(Complete):
    """The values are clipped to [-2, 2]."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return super().combine(weights, v.clamp(-2.0, 2.0), allowed)


@fault("EQV-5", caught_by="zero_queries_over_a_power_of_two_of_keys_are_exact")
@fault("EQV-6", caught_by="a_key_that_wins_by_far_gives_its_value_exactly")
class AlmostOne(Complete):
    """The weights are too large by twice the machine epsilon, which only exact results show."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores, allowed) * (1 + 2 * torch.finfo(scores.dtype).eps)


@fault("EQV-6", caught_by="the_only_key_gives_its_value", trigger="S = 1")
class SigmoidOfTheOnlyScore(Complete):
    """With a single key, its weight is the sigmoid of its score."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if scores.shape[-1] == 1:
            return scores.sigmoid() * allowed
        return super().weigh(scores, allowed)


@fault("EQV-7")
class Sink(Complete):
    """One is added to the denominator of the softmax."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        highest = scores.amax(-1, keepdim=True).clamp(min=0.0)
        raised = (scores - highest).exp().masked_fill(~allowed, 0.0)
        return raised / (raised.sum(-1, keepdim=True) + (-highest).exp())


@fault(
    "EQV-8",
    caught_by="inputs_may_lie_in_one_another",
    script_shows=False,
    trigger="one position of the keys, expanded, as query",
)
class SharedAddressSharedTensor(Complete):
    """A query of the key's shape that starts at the key's address is treated as the key."""

    def attend(self, query: Tensor, key: Tensor, *rest: Any) -> Output:
        same = query.shape == key.shape and query.numel() > 0 and query.data_ptr() == key.data_ptr()
        return super().attend(key if same else query, key, *rest)


@fault("EQV-8", caught_by="self_attention_is_cross_attention", trigger="key and value one tensor")
class ForgetsMemory(Correct):
    """If key and value are one tensor, the call is treated as self-attention."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Output:
        if key is value and key.shape == query.shape:
            query = key
        return super().forward(query, key, value, mask, is_causal)


@fault(
    "EQV-8",
    caught_by="inputs_may_lie_in_one_another",
    script_shows=False,
    trigger="the query is the first of the keys",
)
class AddressTakenForInput(Complete):
    """Query, key and value that start at one address are treated as one tensor."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        same = query.data_ptr() == key.data_ptr() == value.data_ptr() and query.data_ptr() != 0
        return super().attend(query, query if same else key, query if same else value, *rest)


@fault("EQV-9")
class ValueByKeyProjection(Complete):
    """The value is projected by W_k."""

    def project(self, x: Tensor, role: str) -> Tensor:
        return super().project(x, "k" if role == "v" else role)


@fault("EQV-9")
class QueryAndKeySwapped(Complete):
    """The query is projected by W_k, and the key by W_q."""

    def project(self, x: Tensor, role: str) -> Tensor:
        return super().project(x, {"q": "k", "k": "q"}.get(role, role))


@fault("EQV-9")
class KeyAndValueSwapped(Complete):
    """Key and value are swapped."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        return super().attend(query, value, key, *rest)
