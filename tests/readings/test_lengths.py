"""Lengths of the items of a dense batch: inference finds them, and what comes after is not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.conformance import Case
from mha.conformance.harness.errors import Discard
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import properties
from mha.implementations import from_kernel
from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Claims
from support.judging import expect_conforms, expect_fail

CLAUSES = ["LEN-1"]


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    k, v = (x.masked_fill(~allowed.any(2).unsqueeze(-1), 0.0) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    empty = ~allowed.any(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ v


def places(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[2]).unsqueeze(1), torch.arange(k.shape[2])


def of_flash_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    causal: bool = False,
    cache_seqlens: Tensor | None = None,
) -> Tensor:
    mine, theirs = places(q, k_cache)
    lengths = torch.full((len(q),), k_cache.shape[2]) if cache_seqlens is None else cache_seqlens
    lengths = lengths.view(-1, 1, 1, 1)
    allowed = (theirs < lengths) & (mine >= 0)
    if causal:
        allowed = allowed & (theirs <= mine + lengths - q.shape[2])
    return attend(q, k_cache, v_cache, allowed.expand(-1, q.shape[1], -1, -1))


def of_jax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    query_seq_lengths: Tensor | None = None,
    key_value_seq_lengths: Tensor | None = None,
) -> Tensor:
    mine, theirs = places(query, key)
    allowed = (theirs <= mine) | (not is_causal)
    allowed = allowed.expand(*query.shape[:3], key.shape[2])
    if key_value_seq_lengths is not None:
        allowed = allowed & (theirs < key_value_seq_lengths.view(-1, 1, 1, 1))
    if query_seq_lengths is not None:
        allowed = allowed & (mine < query_seq_lengths.view(-1, 1, 1, 1))
    return attend(query, key, value, allowed)


def of_decoding(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, causal: bool = False
) -> Tensor:
    """Take lengths always, as kernels of decoding do."""
    return of_flash_attention(q, k_cache, v_cache, causal, cache_seqlens.clone())


def aligned_to_the_room(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, seqused_k: Tensor | None = None
) -> Tensor:
    mine, theirs = places(q, k)
    allowed = (theirs <= mine + k.shape[2] - q.shape[2]) | (not causal)
    allowed = allowed.expand(*q.shape[:3], k.shape[2])
    if seqused_k is not None:
        allowed = allowed & (theirs < seqused_k.view(-1, 1, 1, 1))
    return attend(q, k, v, allowed)


@pytest.mark.parametrize(
    ("kernel", "lengths", "causal"),
    [
        (of_flash_attention, "keys", "bottom_right"),
        (of_decoding, "keys", "bottom_right"),
        (of_jax, "both", "top_left"),
    ],
)
def test_lengths_are_found_and_conform(
    kernel: Callable[..., Tensor], lengths: str, causal: str
) -> None:
    inference = infer_kernel(kernel)
    assert inference.implementation.claims.lengths == lengths
    assert inference.implementation.claims.causal == causal
    declared: dict[str, Any] = {}
    exec(inference.declaration, {kernel.__name__: kernel}, declared)
    expect_conforms(declared["implementation"], CLAUSES, dtypes=["float32", "bfloat16"])


def test_alignment_to_the_room_for_keys_is_named() -> None:
    inference = infer_kernel(aligned_to_the_room)
    assert "assumed by its name" in " ".join(inference.report().split())
    verdict = expect_fail(inference, "LEN-1")
    assert "places count from the lengths with padding" in verdict.diagnosis


def named_as_padding_is(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, seq_lens: Tensor | None = None
) -> Tensor:
    return of_flash_attention(q, k, v, causal, seq_lens)


def test_lengths_from_which_causal_places_count_are_no_mask() -> None:
    claims = infer_kernel(named_as_padding_is).implementation.claims
    assert claims.lengths == "keys"
    assert not claims.masks
    assert claims.causal == "bottom_right"


def from_the_start_without_lengths(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, nonpad_kv_seqlen: Tensor | None = None
) -> Tensor:
    """As in ONNX: lengths move the causal mask to the end."""
    if nonpad_kv_seqlen is not None:
        return of_flash_attention(q, k, v, is_causal, nonpad_kv_seqlen)
    mine, theirs = places(q, k)
    allowed = ((theirs <= mine) | (not is_causal)).expand(*q.shape[:3], k.shape[2])
    return attend(q, k, v, allowed)


def test_lengths_that_move_the_causal_mask_are_not_claimed() -> None:
    inference = infer_kernel(from_the_start_without_lengths)
    assert inference.implementation.claims.lengths is None
    (row,) = [row for row in inference.rows if row.topic == "items"]
    assert row.evidence.endswith("are aligned top_left without them, and bottom_right with them")


def test_required_lengths_are_of_all_tokens_where_a_call_says_none() -> None:
    shown = " ".join(infer_kernel(of_decoding).report().split())
    assert "cache_seqlens of all tokens" in shown
    assert "no known meaning" not in shown
    assert "not judged" not in shown


def test_the_mean_of_an_item_without_keys_is_open() -> None:
    """Its only value comes after its length, so that zeros, which `of_jax` gives, may be a mean."""
    claims = Claims(
        projections=False, masks=(), empty_row="uniform", lengths="both", returns_weights=False
    )
    implementation = from_kernel(of_jax, layout="b h l d", mask=None, claims=claims)
    case = Case(B=2, projected=False, lengths="keys")
    assert 0 in case.problem().options.key_lengths
    with pytest.raises(Discard, match="its mean may be of the item's own values"):
        properties()["LEN-1"][0].function(Session(implementation, case), case)
