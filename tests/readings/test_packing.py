"""Kernels of packed sequences: inference finds offsets, and each sequence is attended to alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.conformance.faults.packing import AlignedToTheRow, LongestForAll, Varlen
from mha.implementations import ImplementationError, from_kernel
from mha.implementations.adapters.packing import Row
from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Claims, Lse, Packed
from support.judging import expect_conforms, expect_fail

CLAUSES = ["PAK-1", "PAK-2", "PAK-3", "CAU-3", "SHP-1"]


def of_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Return the context (T, H, d), and a log-sum-exp (H, T) on request."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    tokens, keys = torch.arange(len(q)), torch.arange(len(k))
    of_query = torch.bucketize(tokens, cu_seqlens_q[1:], right=True)
    of_key = torch.bucketize(keys, cu_seqlens_k[1:], right=True)
    last = len(cu_seqlens_q) - 1
    allowed = (of_query.unsqueeze(1) == of_key) & (of_key < last)
    if causal:
        ends = torch.nn.functional.pad(cu_seqlens_k[1:] - cu_seqlens_q[1:], (0, 1))
        allowed = allowed & (keys <= (tokens + ends[of_query]).unsqueeze(1))
    q, v = (x.nan_to_num() for x in (q, v))
    scores = (q.transpose(0, 1) @ k.nan_to_num().permute(1, 2, 0)) * scale
    empty = ~allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~allowed, -torch.inf)
    lse = scores.to(torch.promote_types(q.dtype, torch.float32)).logsumexp(-1)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    context = (weights @ v.transpose(0, 1)).transpose(0, 1)
    return (context, lse) if return_attn_probs else context


def of_self_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    if int(cu_seqlens[-1]) != len(query):
        raise ValueError("tokens after the last offset")
    return of_flash_attention(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)


@pytest.mark.parametrize(
    ("kernel", "claims"),
    [
        (of_flash_attention, {"packed": Packed("zero"), "causal": "bottom_right"}),
        (of_self_attention, {"packed": Packed("refused"), "cross_attention": False}),
        (Varlen.attend, {"packed": Packed("zero", gaps=True), "causal": "bottom_right"}),
    ],
    ids=["flash_attention", "self_attention", "gaps"],
)
def test_packed_sequences_are_found_and_conform(
    kernel: Callable[..., Any], claims: dict[str, Any]
) -> None:
    inference = infer_kernel(kernel, "kernel")
    found = inference.implementation.claims
    assert {name: getattr(found, name) for name in claims} == claims
    declared: dict[str, Any] = {}
    exec(inference.declaration, {"kernel": kernel}, declared)
    expect_conforms(declared["implementation"], CLAUSES, dtypes=["float32", "bfloat16"])


def test_log_sum_exps_of_tokens_are_unpacked() -> None:
    inference = infer_kernel(of_flash_attention)
    assert inference.implementation.claims.lse == Lse(layout="h t", gradient=True)
    expect_conforms(inference, ["LSE-1", "PAK-1"], dtypes=["float32", "bfloat16"])


@pytest.mark.parametrize(
    ("faulty", "diagnosis"),
    [
        (AlignedToTheRow, "places count from the numbers of all tokens"),
        (LongestForAll, "as many keys are read for each sequence as the longest one has"),
    ],
)
def test_what_is_wrong_with_a_row_is_named(faulty: type[Varlen], diagnosis: str) -> None:
    claims = Claims(masks=(), causal="bottom_right", returns_weights=False)
    adapted = from_kernel(faulty.attend, layout="t h d", mask=None, claims=claims)
    assert diagnosis in expect_fail(adapted, "PAK-1").diagnosis


def test_a_row_is_unpacked_as_it_was_packed() -> None:
    batch = torch.randn(3, 4, 2, 5)
    row = Row([4, 0, 3], gap=2, tail=1)
    packed = row.pack(batch)
    assert packed.shape == (4 + 0 + 3 + 3 * 2 + 1, 2, 5)
    assert int(packed.isnan().all(-1).all(-1).sum()) == 7
    unpacked = row.unpack(packed, 4)
    assert torch.equal(unpacked[0], batch[0])
    assert torch.equal(unpacked[2, :3], batch[2, :3])
    assert not unpacked[1].any()
    assert not unpacked[2, 3:].any()


@pytest.mark.parametrize(
    ("layout", "claims", "message"),
    [
        ("t h d", {"lengths": "keys"}, "claim no lengths"),
        ("b l h d", {"packed": Packed()}, "claims packed, which the layout 't h d' says"),
    ],
)
def test_claims_that_contradict_the_layout_are_refused(
    layout: str, claims: dict[str, Any], message: str
) -> None:
    given = Claims(masks=(), causal=None, returns_weights=False, **claims)
    with pytest.raises(ImplementationError, match=message):
        from_kernel(of_flash_attention, layout=layout, mask=None, claims=given)


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Packed\.tail must be one of"):
        Packed("kept")  # type: ignore[arg-type]  # an unknown one
