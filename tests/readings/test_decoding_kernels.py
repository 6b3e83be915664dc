"""Kernels that take one query of each item, as those that decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.implementations import from_kernel
from mha.implementations.adapters.kernel_axes import ONE_QUERY_EACH
from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Claims, Config, Lse, Output, Weights, causal_mask

CONFIG = Config(d_model=6, n_heads=2)


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the context of heads (B, H, L, d_k), and its log-sum-exp."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1)


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor, return_lse: bool = False
) -> Any:
    """Keys and values (B, S, H, d_k)."""
    after = torch.arange(k_cache.shape[1]) >= seq_lens[:, None, None, None]
    k, v = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    out, lse = attend(q[:, :, None], k, v, after)
    return (out[:, :, 0], lse[:, :, 0]) if return_lse else out[:, :, 0]


def decode_all(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False) -> Any:
    """Keys and values (B, H, S, d_k), and no lengths."""
    out, lse = attend(q[:, :, None], k, v, torch.zeros(1, dtype=torch.bool))
    return (out[:, :, 0], lse[:, :, 0]) if return_lse else out[:, :, 0]


def whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    return_lse: bool = False,
    cache_seqlens: Tensor | None = None,
) -> Any:
    """The same of all queries (B, H, L, d_k)."""
    queries, keys = q.shape[2], k.shape[2]
    lengths = torch.full((len(q),), keys) if cache_seqlens is None else cache_seqlens
    hidden = []
    for length in lengths.tolist():
        seen = torch.ones(queries, keys, dtype=torch.bool)
        seen[:, length:] = False
        if causal:
            seen[:, :length] = causal_mask(queries, length, "bottom_right")
        hidden.append(~seen)
    out, lse = attend(q, k, v, torch.stack(hidden)[:, None])
    return (out, lse) if return_lse else out


def attended(kernel: Callable[..., Any], layout: str, claims: Claims, **options: Any) -> Output:
    """Return what a kernel gives for five queries and three keys of two items."""
    generator = torch.Generator().manual_seed(0)
    query, memory = (torch.randn(2, n, 6, generator=generator).double() for n in (5, 3))
    implementation = from_kernel(kernel, mask=None, layout=layout, claims=claims)
    weights = Weights.random(CONFIG, 0, torch.float64)
    attention = implementation.build(CONFIG, weights, dtype=torch.float64, device="cpu")
    return attention(query, memory, memory, return_lse=True, **options)


OF_LENGTHS = Claims(
    masks=(),
    causal="bottom_right",
    returns_weights=False,
    lengths="keys",
    lse=Lse(layout="b l h"),
)
WITHOUT_LENGTHS = replace(OF_LENGTHS, lengths=None)
CASES = [
    (decode, OF_LENGTHS, {}),
    (decode, OF_LENGTHS, {"is_causal": True}),
    (decode, OF_LENGTHS, {"key_lengths": (3, 1)}),
    (decode, OF_LENGTHS, {"key_lengths": (3, 1), "is_causal": True}),
    (decode_all, WITHOUT_LENGTHS, {}),
    (decode_all, WITHOUT_LENGTHS, {"is_causal": True}),
]


@pytest.mark.parametrize(("kernel", "claims", "options"), CASES)
def test_a_kernel_of_one_query_of_each_item_is_called_for_each_place(
    kernel: Callable[..., Any], claims: Claims, options: dict[str, Any]
) -> None:
    keys_first, heads_first = ONE_QUERY_EACH
    layout = keys_first if kernel is decode else heads_first

    each = attended(kernel, layout, claims, **options)
    of_whole = replace(claims, lse=Lse(layout="b h l"))
    expected = attended(whole, "b h l d", of_whole, **options)

    torch.testing.assert_close(each.output, expected.output)
    torch.testing.assert_close(each.lse, expected.lse)


def test_lengths_and_axes_of_a_decoding_kernel_are_found() -> None:
    found = infer_kernel(decode)

    assert found.implementation.layout == "b h d, b l h d"
    assert found.implementation.claims.lengths == "keys"
    inputs = [row.finding for row in found.rows if row.topic == "inputs"]
    assert inputs == [
        "q, k_cache, v_cache, of shape (b, h, d) and (b, s, h, d), one query of each item in a call"
    ]


def test_a_decoding_kernel_without_lengths_is_found() -> None:
    found = infer_kernel(decode_all)
    assert found.implementation.layout == "b h d, b h l d"
    causal = [row.finding for row in found.rows if row.topic == "causal"]
    assert causal == ["each query is given the keys up to its place, aligned bottom_right"]


def test_an_item_without_a_key_decides_the_policy_of_a_kernel_with_lengths() -> None:
    def nan_of_no_key(q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor) -> Tensor:
        out = decode(q, k_cache, v_cache, seq_lens)
        return out.masked_fill((seq_lens == 0)[:, None, None], torch.nan)

    assert infer_kernel(nan_of_no_key).implementation.claims.empty_row == "nan"
    assert infer_kernel(decode).implementation.claims.empty_row == "zeros"
