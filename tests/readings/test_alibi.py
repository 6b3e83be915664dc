"""ALiBi: inference reads the form of the bias, and a turned sign is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Alibi, Scores, alibi_bias, causal_mask
from support.judging import expect_conforms, expect_fail

CLAUSES = ["ALB-1", "EFF-1"]


def biased(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, alignment: str, is_causal: bool = False
) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias.to(scores)
    if is_causal:
        causal = causal_mask(q.shape[2], k.shape[2], alignment)  # type: ignore[arg-type]  # of two words
        scores = scores.masked_fill(~causal, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v


def distances(q: Tensor, k: Tensor, alignment: str) -> Tensor:
    offset = k.shape[2] - q.shape[2] if alignment == "bottom_right" else 0
    return (torch.arange(k.shape[2]) - torch.arange(q.shape[2]).unsqueeze(1) - offset).float()


def of_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, alibi_slopes: Tensor | None = None
) -> Tensor:
    away = -distances(q, k, "bottom_right").abs()
    bias = None if alibi_slopes is None else alibi_slopes.view(-1, 1, 1) * away
    return biased(q, k, v, bias, "bottom_right", causal)


def of_vllm(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, alibi_slopes: Tensor | None = None
) -> Tensor:
    bias = None if alibi_slopes is None else alibi_slopes.view(-1, 1, 1) * torch.arange(k.shape[2])
    return biased(q, k, v, bias, "top_left", is_causal)


def turned(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, alibi_slopes: Tensor | None = None
) -> Tensor:
    return of_vllm(q, k, v, is_causal, None if alibi_slopes is None else -alibi_slopes)


def from_the_start(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None = None) -> Tensor:
    away = -distances(q, k, "top_left").abs()
    return biased(
        q, k, v, None if alibi_slopes is None else alibi_slopes.view(-1, 1, 1) * away, "top_left"
    )


@pytest.mark.parametrize(
    ("kernel", "scores"),
    [
        (of_flash_attention, Scores(alibi=Alibi("symmetric"))),
        (of_vllm, Scores(alibi=Alibi("signed"))),
        (from_the_start, Scores(alibi=Alibi("symmetric"), alignment="top_left")),
    ],
)
def test_form_of_the_bias_is_found_and_conforms(
    kernel: Callable[..., Tensor], scores: Scores
) -> None:
    inference = infer_kernel(kernel)
    assert inference.implementation.claims.scores == scores
    declared: dict[str, object] = {}
    exec(inference.declaration, {kernel.__name__: kernel}, declared)
    expect_conforms(inference, CLAUSES, dtypes=["float32", "bfloat16"])


def test_a_turned_sign_is_named() -> None:
    inference = infer_kernel(turned)
    assert "assumed by its name" in " ".join(inference.report().split())
    verdict = expect_fail(inference, "ALB-1")
    assert "the bias of ALiBi has the opposite sign" in verdict.diagnosis


@pytest.mark.parametrize("field", [{"form": "linear"}, {"form": "signed", "origin": "key"}])
def test_unknown_words_are_refused(field: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"Alibi\.(form|origin) must be one of"):
        Alibi(**field)  # type: ignore[arg-type]  # unknown ones


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_bias_is_what_its_docstring_says(alignment: str) -> None:
    bias = alibi_bias((0.5, 2.0), "signed", 3, 5, alignment)  # type: ignore[arg-type]  # of two words
    offset = 2 if alignment == "bottom_right" else 0
    for head, slope in enumerate((0.5, 2.0)):
        for query in range(3):
            for key in range(5):
                assert float(bias[head, query, key]) == slope * (key - query - offset)
