"""Kernels are judged on query, key and value themselves, without projections around them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.conformance import check
from mha.conformance.cases.case import Case
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import properties
from mha.conformance.settings import Settings
from mha.implementations import from_kernel, resolve
from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Claims, Lse, Rounding, Scores, oracle
from support.judging import expect_conforms, verdict_of

ABOUT_LENGTHS = [
    "SHP-1",
    "SHP-5",
    "HED-1",
    "EQV-2",
    "EQV-3",
    "EQV-5",
    "EQV-7",
    "EQV-8",
    "GQA-1",
    "STA-3",
]


def packed(qkv: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2)


def packed_with_lse(qkv: Tensor, return_lse: bool = False) -> Any:
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    context = (scores.softmax(-1) @ v).transpose(1, 2)
    return (context, scores.logsumexp(-1)) if return_lse else context


def of_one_key_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert k.shape[1] == 1
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def masked_before_scaling(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, softmax_scale: float | None = None
) -> Tensor:
    """Its maximum is of scores before scaling, as in FlashAttention-2: for positive scales."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = q @ k.mT
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    raised = ((scores - scores.amax(-1, keepdim=True)) * scale).exp()
    return raised / raised.sum(-1, keepdim=True) @ v


def in_half_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.dtype.itemsize != 2:
        raise TypeError("half precision alone")
    scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    return (scores.softmax(-1) @ v.float()).to(q)


def causal_mean_of_empty_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Always causal, the last query at the last key; the mean of all values without a key."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    queries, keys = scores.shape[-2:]
    hidden = ~torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if mask is not None:
        hidden = hidden | ~mask
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1) @ v


def test_query_before_the_one_key_that_its_mask_allows_is_an_empty_row() -> None:
    claims = Claims(
        always_causal=True, causal="bottom_right", empty_row="uniform", returns_weights=False
    )
    assert verdict_of(from_kernel(causal_mean_of_empty_rows, claims=claims), "EQV-6").conforms


def test_queries_of_self_attention_change_with_the_keys() -> None:
    claims = Claims(masks=(), causal=None, returns_weights=False, cross_attention=False)
    kernel = from_kernel(packed, layout="b l 3 h d", mask=None, claims=claims)
    expect_conforms(kernel, ABOUT_LENGTHS, strict=True)


@pytest.mark.parametrize("base", ["e", "2"])
def test_merges_of_the_judge_are_within_the_bound_where_scores_are_large(base: str) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False) -> Any:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        lse = scores.logsumexp(-1) / (math.log(2) if base == "2" else 1.0)
        return (scores.softmax(-1) @ v, lse) if return_lse else scores.softmax(-1) @ v

    claims = Claims(
        masks=(),
        causal=None,
        returns_weights=False,
        lse=Lse(base=base),  # type: ignore[arg-type]  # one of its bases
        rounding=Rounding(
            scores_stored=False, weights_stored=False, softmax_stored=False, log_normaliser=False
        ),
    )
    case = Case(
        n_heads=4,
        head_dim=4,
        L=65,
        S=2,
        dtype="float64",
        values="integers",
        seed=14272,
        projected=False,
        return_lse=True,
    )
    session = Session(from_kernel(kernel, mask=None, claims=claims), case)
    properties()["LSE-2"][0].function(session, case)


def test_keys_of_self_attention_are_not_split() -> None:
    claims = Claims(
        masks=(), causal=None, returns_weights=False, cross_attention=False, lse=Lse(dtype="input")
    )
    kernel = from_kernel(packed_with_lse, layout="b l 3 h d", mask=None, claims=claims)
    verdict = verdict_of(kernel, "LSE-2")
    assert verdict.status == "not_claimed"
    assert "a query goes with each key" in verdict.message
    assert verdict_of(kernel, "LSE-1", "smoke").status == "pass"


@pytest.mark.parametrize(
    ("kernel", "claim"), [(of_one_key_head, "multi_query"), (grouped, "grouped_query")]
)
def test_keys_may_have_fewer_heads(kernel: Callable[..., Tensor], claim: str) -> None:
    claims = Claims(masks=(), causal=None, returns_weights=False, **{claim: True})  # type: ignore[arg-type]  # a flag
    expect_conforms(from_kernel(kernel, mask=None, claims=claims), ABOUT_LENGTHS)


def test_scale_is_tried_with_the_causal_flag_too() -> None:
    inference = infer_kernel(masked_before_scaling)
    assert inference.implementation.claims.scores == Scores(scale="positive")
    expect_conforms(inference, ["SCL-1", "CAU-2"])


def test_kernels_are_judged_in_float32_and_bfloat16_in_what_they_take() -> None:
    assert Settings.of().of_target(resolve("sdpa")[0]).dtypes == ("float32", "bfloat16")
    assert Settings.of().of_target(resolve("loop")[0]).dtypes == ("float32", "float64")
    report = check(infer_kernel(in_half_alone).implementation, "quick", clauses="NUM-1")
    assert [verdict.dtype for verdict in report.verdicts] == ["bfloat16"]
    assert report.conforms
    given = check("sdpa", "quick", clauses="SHP-1", dtypes="float64")
    assert [verdict.dtype for verdict in given.verdicts] == ["float64"]


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "expanded"])
def test_inputs_are_what_projections_give_in_the_layout_of_the_case(layout: str) -> None:
    case = Case(n_heads=2, head_dim=3, B=2, L=4, S=5, layout=layout, seed=2)
    whole, direct = case.problem(), Case(**vars(case) | {"projected": False}).problem()
    claims = Claims(rounding=Rounding())
    assert torch.allclose(
        oracle(direct, claims).query.mid, oracle(whole, claims).query.mid, atol=1e-6
    )
    doubled = direct.change(w_q=2 * direct.weights.w_q)
    assert torch.equal(doubled.query, 2 * direct.query)
    assert doubled.query.stride() == direct.query.stride()
    with pytest.raises(ValueError, match="w_o cannot be changed where there are no projections"):
        direct.change(w_o=2 * direct.weights.w_o)


def test_a_scale_that_is_half_a_percent_off_fails_in_bfloat16() -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * (1.005 * q.shape[-1] ** -0.5)).softmax(-1) @ v

    claims = Claims(masks=(), causal=None, returns_weights=False, dtypes={"bfloat16"})
    (verdict,) = check(
        from_kernel(kernel, mask=None, claims=claims), "quick", clauses=["NUM-7"]
    ).verdicts
    assert verdict.status == "fail"
