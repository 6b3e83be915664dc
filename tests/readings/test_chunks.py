"""Chunks: inference finds them and where they are counted from, and a window in their place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Scores
from support.judging import expect_conforms, expect_fail

CLAUSES = ["CHK-1", "EFF-1"]


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, causal: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    allowed = causal if allowed is None else allowed & causal
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num() @ v


def places(q: Tensor, k: Tensor, offset: int = 0) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[2]).unsqueeze(1) + offset, torch.arange(k.shape[2])


def of_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, attention_chunk: int = 0
) -> Tensor:
    mine, theirs = places(q, k, k.shape[2] - q.shape[2])
    same = mine // attention_chunk == theirs // attention_chunk if attention_chunk else None
    return attend(q, k, v, same, theirs <= mine if causal else mine == mine)


def from_the_start(q: Tensor, k: Tensor, v: Tensor, chunk_size: int | None = None) -> Tensor:
    mine, theirs = places(q, k)
    same = None if chunk_size is None else mine // chunk_size == theirs // chunk_size
    return attend(q, k, v, same, mine == mine)


def as_a_window(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, attention_chunk_size: int = 0
) -> Tensor:
    mine, theirs = places(q, k)
    last = theirs > mine - attention_chunk_size if attention_chunk_size else None
    return attend(q, k, v, last, theirs <= mine if is_causal else mine == mine)


def of_tiles(q: Tensor, k: Tensor, v: Tensor, chunk_size: int = 64) -> Tensor:
    return torch.cat(
        [attend(x, k, v, None, places(x, k)[0] >= 0) for x in q.split(chunk_size, 2)], 2
    )


@pytest.mark.parametrize(
    ("kernel", "scores"),
    [
        (of_flash_attention, Scores(chunk=True)),
        (from_the_start, Scores(chunk=True, alignment="top_left")),
    ],
)
def test_chunks_are_found_and_conform(kernel: Callable[..., Tensor], scores: Scores) -> None:
    inference = infer_kernel(kernel)
    assert inference.implementation.claims.scores == scores
    declared: dict[str, object] = {}
    exec(inference.declaration, {kernel.__name__: kernel}, declared)
    expect_conforms(inference, CLAUSES, dtypes=["float32", "bfloat16"])


def test_a_window_in_place_of_chunks_is_named() -> None:
    inference = infer_kernel(as_a_window)
    assert "assumed by its name" in " ".join(inference.report().split())
    verdict = expect_fail(inference, "CHK-1")
    assert "the chunks are read as a window of the last keys" in verdict.diagnosis


def test_a_size_of_tiles_is_no_chunk() -> None:
    inference = infer_kernel(of_tiles)
    assert not inference.implementation.claims.scores.chunk
    assert inference.not_covered == ("chunk_size",)
