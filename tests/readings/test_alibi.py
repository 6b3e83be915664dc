"""ALiBi: inference reads the form of the bias, and a turned sign is named."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mha.implementations import ImplementationError
from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Alibi, Scores, alibi_bias, alibi_slopes, causal_mask
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


def of_each_item(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None = None) -> Tensor:
    """Take slopes (H,) or (B, H), as flash-attention 2."""
    bias = None
    if alibi_slopes is not None:
        bias = alibi_slopes[..., None, None] * distances(q, k, "top_left")
    return biased(q, k, v, bias, "top_left")


def of_flashinfer(q: Tensor, k: Tensor, v: Tensor, pos_encoding_mode: str = "NONE") -> Tensor:
    bias = None
    if pos_encoding_mode == "ALIBI":
        slopes = torch.tensor(alibi_slopes(q.shape[1]))
        bias = slopes.view(-1, 1, 1) * distances(q, k, "top_left")
    return biased(q, k, v, bias, "top_left")


def of_cudnn(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, use_alibi_mask: bool = False
) -> Tensor:
    if use_alibi_mask and not is_causal:
        raise ValueError("use_alibi_mask needs is_causal")
    heads = torch.arange(1, q.shape[1] + 1)
    slopes = 2.0 ** (-8 * heads / q.shape[1])  # which is right for powers of two
    bias = slopes.view(-1, 1, 1) * distances(q, k, "top_left") if use_alibi_mask else None
    return biased(q, k, v, bias, "top_left", is_causal)


@pytest.mark.parametrize(
    ("kernel", "alibi", "clause"),
    [
        (of_each_item, Alibi("signed", per_item=True), "ALB-1"),
        (of_flashinfer, Alibi("signed", built_in=True), "ALB-2"),
    ],
)
def test_slopes_of_items_and_built_in_ones_are_found_and_conform(
    kernel: Callable[..., Tensor], alibi: Alibi, clause: str
) -> None:
    inference = infer_kernel(kernel)
    assert inference.implementation.claims.scores.alibi == alibi
    expect_conforms(inference, [clause, "ALB-1", "EFF-1"], dtypes=["float32", "bfloat16"])


def test_slopes_for_powers_of_two_only_are_named() -> None:
    inference = infer_kernel(of_cudnn)
    assert inference.implementation.claims.scores.alibi == Alibi("signed", built_in=True)
    verdict = expect_fail(inference, "ALB-2")
    assert "the slopes of ALiBi are 2^(-8j/H), as if H were a power of two" in verdict.diagnosis


@pytest.mark.parametrize("n_heads", [1, 2, 3, 5, 8, 12, 16, 24])
def test_usual_slopes_are_every_second_one_of_twice_as_many(n_heads: int) -> None:
    """As Press et al. make them: of n heads, then of every second one of 2n heads."""
    power = 2 ** math.floor(math.log2(n_heads))
    usual = [2 ** (-8 * place / power) for place in range(1, power + 1)]
    denser = [2 ** (-8 * place / (2 * power)) for place in range(1, 2 * power + 1)]
    assert alibi_slopes(n_heads) == pytest.approx(usual + denser[::2][: n_heads - power])


def with_slopes_in_each_call(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return of_flash_attention(q, k, v, causal, torch.tensor(alibi_slopes(q.shape[1])).double())


@pytest.mark.slow
def test_slopes_in_each_call_are_named() -> None:
    with pytest.raises(ImplementationError, match=r"the usual slopes .* as -m \|t - p\|, which no"):
        infer_kernel(with_slopes_in_each_call)
