"""The word "causal" in the place of a mask, as MLX takes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mha.implementations import ImplementationError, from_kernel
from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Claims
from support.judging import expect_fail, expect_pass

# To look for causes and simpler cases takes longer than to judge.
pytestmark = pytest.mark.usefixtures("undiagnosed", "unshrunk")

CLAUSES = ["CAU-2", "CAU-4", "PTH-4"]


def attended(q: Tensor, k: Tensor, v: Tensor, mask: str | Tensor | None, top_left: bool) -> Tensor:
    allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f"unknown mask {mask!r}")
        allowed = allowed.tril(0 if top_left else k.shape[-2] - q.shape[-2])
    elif mask is not None:
        allowed = allowed & mask
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v


def bottom_right(q: Tensor, k: Tensor, v: Tensor, mask: str | Tensor | None = None) -> Tensor:
    return attended(q, k, v, mask, top_left=False)


def top_left(q: Tensor, k: Tensor, v: Tensor, mask: str | Tensor | None = None) -> Tensor:
    return attended(q, k, v, mask, top_left=True)


def without_words(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return attended(q, k, v, None if mask is None else mask.bool(), top_left=True)


@pytest.mark.parametrize("kernel", [bottom_right, top_left])
def test_word_is_read_with_its_alignment_and_judged(kernel: object) -> None:
    inference = infer_kernel(kernel)
    rows = {row.topic: row.finding for row in inference.rows}
    assert rows["causal"] == f'mask="causal", aligned {kernel.__name__}'  # type: ignore[attr-defined]  # a function
    assert "causal_word='causal'" in inference.declaration.replace('"', "'")
    expect_pass(inference, *CLAUSES)


def square(q: Tensor, k: Tensor, v: Tensor, mask: str | Tensor | None = None) -> Tensor:
    if isinstance(mask, str) and q.shape[-2] != k.shape[-2]:
        mask = None
    return attended(q, k, v, mask, top_left=True)


def test_word_that_counts_with_equal_lengths_only_is_claimed_and_fails() -> None:
    inference = infer_kernel(square)
    rows = {row.topic: row.finding for row in inference.rows}
    assert rows["causal"] == 'mask="causal", with as many keys as queries only'
    expect_fail(inference, "CAU-3")


def test_function_without_words_is_causal_through_its_mask() -> None:
    rows = {row.topic: row.finding for row in infer_kernel(without_words).rows}
    assert rows["causal"] == "through the mask, aligned top_left"


def test_function_that_requires_a_mask_is_not_read_as_taking_words() -> None:
    def required(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(attn_mask, -1e9)
        return scores.softmax(-1) @ v

    rows = {row.topic: row.finding for row in infer_kernel(required).rows}
    assert rows["causal"] == "through the mask, aligned top_left"


def test_word_needs_a_mask_to_stand_for() -> None:
    with pytest.raises(ImplementationError, match="causal_word='causal' is given in the place"):
        from_kernel(bottom_right, mask=None, causal_word="causal")


def test_word_of_the_other_alignment_fails() -> None:
    claims = Claims(causal="top_left", returns_weights=False)
    expect_fail(
        from_kernel(bottom_right, mask="keep", causal_word="causal", claims=claims), "CAU-3"
    )
