"""Correct implementations of other conventions, each with the claims that say so, conform."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import faults
import faulty
from mha.conformance import check
from mha.implementations import from_module
from mha.spec import Claims, Output, causal_mask


class NanForEmptyRow(faults.Correct):
    """Policy "nan", written in at the end: a NaN in the softmax would spoil the gradients of other rows (MSK-9)."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Output:
        output, weights = super().forward(query, key, value, mask, is_causal)
        empty = (weights == 0).all(-1, keepdim=True)
        return Output(output.masked_fill(empty.any(1), math.nan), weights.masked_fill(empty, math.nan))


class RaisesForEmptyRow(faults.Correct):
    """Policy "error"."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if not bool(allowed.any(-1).all()):
            raise ValueError("a query has no key to attend to")
        return super().weigh(scores, allowed)


class BottomRight(faults.Correct):
    """The last query sees every key."""

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
        allowed = super().allow(mask, False, q, k)
        return allowed & causal_mask(q.shape[2], k.shape[2], "bottom_right") if is_causal else allowed


class SelfOnly(faults.Correct):
    """Refuses three different inputs, and masks that differ by head; returns no weights."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Output:
        if query is not key or key is not value:
            raise NotImplementedError("only self-attention")
        if mask is not None and mask.ndim == 4 and mask.shape[1] != 1:
            raise NotImplementedError("one mask for all heads")
        return Output(super().forward(query, key, value, mask, is_causal).output)


class BaseTwo(faults.Correct):
    """The softmax by powers of two, as kernels compute it, over tiles of three keys with a running maximum."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        scores = (scores * math.log2(math.e)).masked_fill(~allowed, -math.inf)
        highest = torch.full_like(scores[..., :1], torch.finfo(scores.dtype).min)
        total, parts = torch.zeros_like(highest), []
        for tile in scores.split(3, -1):
            higher = torch.maximum(highest, tile.amax(-1, keepdim=True))
            rescale, raised = torch.exp2(highest - higher), torch.exp2(tile - higher)
            parts = [part * rescale for part in parts] + [raised]
            total, highest = total * rescale + raised.sum(-1, keepdim=True), higher
        return torch.cat(parts, -1) / total.masked_fill(total == 0, 1.0)


ONLY_SELF = Claims(cross_attention=False, per_head_mask=False, returns_weights=False)
VARIANTS: dict[str, tuple[type[faults.Correct], Claims]] = {
    "uniform": (faulty.FiniteFill, Claims(empty_row="uniform")),
    "nan": (NanForEmptyRow, Claims(empty_row="nan")),
    "error": (RaisesForEmptyRow, Claims(empty_row="error")),
    "bottom right": (BottomRight, Claims(causal="bottom_right")),
    "only self-attention": (SelfOnly, ONLY_SELF),
    "tiled, base two": (BaseTwo, Claims()),
    "no masks": (faults.Correct, Claims(masks=(), causal=None)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_conforms(variant: str) -> None:
    cls, claims = VARIANTS[variant]
    implementation = from_module(cls, parameters=faults.PARAMETERS, claims=claims)
    report = check(implementation, "quick", dtypes=["float32"])
    departures = [
        (v.clause, v.status, v.message[-600:], v.case)
        for v in report.verdicts
        if v.status not in ("pass", "not_claimed")
    ]
    assert not departures
    assert sum(verdict.status == "pass" for verdict in report.verdicts) >= 20


@pytest.mark.parametrize(
    "wrong",
    [{"masks": {"boolean"}}, {"masks": "bool"}, {"causal": "left"}, {"empty_row": "zero"}, {"dtypes": {"half"}}],
)
def test_unknown_words_in_claims_are_told(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"Claims.{name} must be"):
        Claims(**wrong)
