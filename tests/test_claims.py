"""Correct implementations of other conventions, each with the claims that say so, conform."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from complete import CLAIMS
from torch import Tensor

import faults
import faulty
from mha.conformance import Verdict, check
from mha.conformance.registry import properties
from mha.spec import Attention, Claims, Config, Output, Rounding, Weights, causal_mask


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


class OrderOfSummation(faults.Complete):
    """The keys are summed up in one order or in the other, as the first of the values says."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        context = (weights @ v) * 0
        turned = v.numel() > 0 and bool(v.flatten()[0] > 0)
        for key in reversed(range(v.shape[2])) if turned else range(v.shape[2]):
            context = context + weights[..., key : key + 1] * v[:, :, key : key + 1]
        return context


class SoftmaxInSingle(faults.Complete):
    """The softmax is in float32, whatever the inputs are."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores.float(), allowed).to(scores)


ONLY_SELF = Claims(cross_attention=False, per_head_mask=False, returns_weights=False)
IN_SINGLE = replace(CLAIMS, rounding=Rounding(softmax_in_float32=True))
VARIANTS: dict[str, tuple[type[faults.Correct | faults.Complete], Claims]] = {
    "uniform": (faulty.FiniteFill, Claims(empty_row="uniform")),
    "nan": (NanForEmptyRow, Claims(empty_row="nan")),
    "error": (RaisesForEmptyRow, Claims(empty_row="error")),
    "bottom right": (BottomRight, Claims(causal="bottom_right")),
    "only self-attention": (SelfOnly, ONLY_SELF),
    "tiled, base two": (BaseTwo, Claims()),
    "no masks": (faults.Correct, Claims(masks=(), causal=None)),
    "another order of summation": (OrderOfSummation, replace(CLAIMS, retiles=True, composes=())),
}
# Only the clauses, or families, on which the claim bears; all where nothing is said.
ON_ROWS = ("SHP", "SMX-1", "SMX-5", "MSK", "PTH-1", "PTH-2", "EQV-5", "NUM-1", "GRD-1", "GRD-4", "STA-1", "STA-3")
BEARS_ON = {
    "uniform": ON_ROWS,
    "nan": ON_ROWS,
    "error": ON_ROWS,
    "bottom right": ("CAU", "PTH-3", "PTH-4", "MSK-5", "MSK-8", "SMX-5", "NUM-1", "NUM-5", "GRD-1", "EQV-5"),
    "tiled, base two": ("SHP", "SMX", "MSK-1", "MSK-6", "MSK-8", "CAU-1", "EQV", "NUM", "GRD-1", "GRD-4"),
    "another order of summation": ("MSK", "CAU", "HED", "EQV", "NUM", "DRP", "STA-3", "STA-4", "INC", "GQA", "XAT"),
}
# What a plain formula and these policies do not keep; all else must be kept, also what is only recommended.
RECOMMENDED = {
    "MSK-8": "a policy other than zeros",
    "MSK-10": "zero times NaN is NaN",
    "SHP-5": "no maximum of no keys",
}


def judged(cls: type[faults.Correct | faults.Complete], claims: Claims, **options: Any) -> list[Verdict]:
    """Judge a class; return the verdicts that are neither a pass nor about what is not claimed."""
    report = check(faults.implementation_of(cls, claims), "quick", **options)
    assert report.conforms, [(v.clause, v.status, v.message, v.case) for v in report.verdicts if not v.conforms]
    assert sum(verdict.status == "pass" for verdict in report.verdicts) >= min(20, len(report.verdicts) // 2)
    return [verdict for verdict in report.verdicts if verdict.status not in ("pass", "not_claimed")]


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_conforms(variant: str) -> None:
    clauses = {clause for clause in properties() if clause.startswith(BEARS_ON.get(variant, ("",)))}
    departures = judged(*VARIANTS[variant], dtypes=["float32"], clauses=clauses)
    assert {v.clause for v in departures} <= set(RECOMMENDED), departures
    assert not any(verdict.required for verdict in departures)


def test_an_order_of_summation_that_depends_on_numbers_must_be_claimed() -> None:
    unclaimed = faults.implementation_of(OrderOfSummation, replace(CLAIMS, composes=()))
    report = check(unclaimed, clauses=["MSK-1", "HED-2", "EQV-1"], dtypes=["float32"])
    assert "fail" in {verdict.status for verdict in report.verdicts}


def test_softmax_in_single_precision_must_be_claimed_and_takes_a_clause_away() -> None:
    clauses = ["NUM-1", "NUM-2", "SMX-1", "SMX-2", "GRD-1"]
    claimed = faults.implementation_of(SoftmaxInSingle, IN_SINGLE)
    statuses = {v.clause: v.status for v in check(claimed, "quick", clauses=clauses, dtypes=["float64"]).verdicts}
    assert statuses == dict.fromkeys(clauses, "pass") | {"NUM-2": "not_claimed"}
    unclaimed = check(faults.implementation_of(SoftmaxInSingle), clauses=["NUM-1", "NUM-2"], dtypes=["float64"])
    assert {verdict.status for verdict in unclaimed.verdicts} == {"fail"}


def test_softmax_in_single_precision_is_not_differenced() -> None:
    claimed = faults.implementation_of(SoftmaxInSingle, IN_SINGLE)
    assert check(claimed, "quick", clauses=["GRD-2"], dtypes=["float64"]).verdicts[0].status == "not_claimed"


class NoModule:
    """A function and its weights: no `torch.nn.Module`, and no gradients of weights are told."""

    name, claims = "no-module", Claims()

    def build(self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str) -> Attention:
        inner = faults.complete.build(config, weights, dtype=dtype, device=device)

        class Function:
            def train(self) -> Function:
                return self

            def eval(self) -> Function:
                return self

            def __call__(self, *inputs: Tensor, mask: Tensor | None = None, **options: bool) -> Output:
                if mask is not None and mask.dtype != torch.bool:
                    raise TypeError(f"masks are boolean, not {mask.dtype}")
                return inner(*inputs, mask=mask, **options)

        return Function()


def test_what_is_no_module_conforms_and_has_no_state() -> None:
    clauses = [
        clause for clause in properties() if clause.startswith(("CFG", "SHP", "PTH", "GRD", "DRP", "STA", "CMP"))
    ]
    report = check(NoModule(), "quick", dtypes=["float32"], clauses=clauses, strict=True)
    statuses = {verdict.clause: verdict.status for verdict in report.verdicts}
    assert report.conforms, [verdict for verdict in report.verdicts if not verdict.conforms]
    unclaimed = {clause for clause, status in statuses.items() if status == "not_claimed"}
    assert {"STA-4", "GRD-7", "CMP-3", "DRP-1"} <= unclaimed
    assert {"STA-1", "GRD-1", "CFG-5"} <= {clause for clause, status in statuses.items() if status == "pass"}


@pytest.mark.parametrize(
    "wrong",
    [{"masks": {"boolean"}}, {"masks": "bool"}, {"causal": "left"}, {"empty_row": "zero"}, {"dtypes": {"half"}}],
)
def test_unknown_words_in_claims_are_told(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"Claims.{name} must be"):
        Claims(**wrong)
