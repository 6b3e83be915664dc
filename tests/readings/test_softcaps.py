"""Caps of the scores: inference reads where they act, and a tangent that overflows fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Claims, Options, Problem, Scores, Weights, causal_mask, gradients, oracle
from mha.spec.config import Config
from support.judging import expect_conforms, expect_fail, judged

CLAUSES = ["CAP-1", "CAP-2", "CAP-3", "EFF-1"]


def weighed(scores: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    if is_causal:
        scores = scores.masked_fill(
            ~causal_mask(scores.shape[2], scores.shape[3], "top_left"), -torch.inf
        )
    return scores.softmax(-1) @ v


def tanh_of(scores: Tensor, cap: float | None) -> Tensor:
    return cap * torch.tanh(scores / cap) if cap else scores


def before_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
) -> Tensor:
    scores = tanh_of(q @ k.mT * q.shape[-1] ** -0.5, softcap)
    return weighed(scores if mask is None else scores + mask, v, is_causal)


def after_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    is_causal: bool = False,
    logit_cap: float | None = None,
) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    masked = (
        torch.zeros_like(scores, dtype=torch.bool)
        if bias is None
        else (bias == -torch.inf).expand_as(scores)
    )
    finite = torch.zeros_like(scores) if bias is None else bias.masked_fill(bias == -torch.inf, 0.0)
    return weighed(
        tanh_of(scores + finite, logit_cap).masked_fill(masked, -torch.inf), v, is_causal
    )


def ignored(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, logits_soft_cap: float = 0.0
) -> Tensor:
    return weighed(q @ k.mT * q.shape[-1] ** -0.5, v, is_causal)


def none_for_no_cap(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, softcap: float | None = None
) -> Tensor:
    """As in transformers: a cap of 0 would be one."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return weighed(scores, v, is_causal)


def switched(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    sink: bool = False,
    sliding_window: bool = False,
) -> Tensor:
    return weighed(q @ k.mT * q.shape[-1] ** -0.5, v, is_causal)


def overflowing(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, softcap: float = 0.0
) -> Tensor:
    """The tangent of vLLM's kernels."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        high, low = (scores / softcap).exp(), (-scores / softcap).exp()
        scores = softcap * (high - low) / (high + low)
    return weighed(scores, v, is_causal)


@pytest.mark.parametrize(
    ("kernel", "place"), [(before_mask, "before_bias"), (after_mask, "after_bias")]
)
def test_place_of_a_cap_is_found_and_conforms(kernel: Callable[..., Tensor], place: Any) -> None:
    inference = infer_kernel(kernel)
    assert inference.implementation.claims.scores == Scores(softcap=place)
    expect_conforms(inference, CLAUSES, dtypes=["float32", "bfloat16"])
    declared: dict[str, Any] = {}
    exec(inference.declaration, {kernel.__name__: kernel}, declared)
    assert declared["implementation"].claims == inference.implementation.claims


def test_what_stands_for_no_cap_is_passed_where_0_is_one() -> None:
    inference = infer_kernel(none_for_no_cap)
    assert inference.implementation.claims.scores == Scores(softcap="before_bias")
    expect_conforms(inference, CLAUSES)


def test_flags_are_no_sinks_and_no_windows() -> None:
    assert infer_kernel(switched).implementation.claims.scores == Scores()


def test_cap_without_an_effect_is_said() -> None:
    inference = infer_kernel(ignored)
    assert "logits_soft_cap has no effect" in inference.report()
    expect_fail(inference, "EFF-1", "softcap=")


@pytest.mark.slow
def test_tangent_that_overflows_fails() -> None:
    inference = infer_kernel(overflowing)
    assert inference.implementation.claims.scores.softcap == "before_bias"
    report = judged(inference, ["CAP-1", "CAP-3"])
    failed = [verdict for verdict in report.verdicts if verdict.status == "fail"]
    assert failed
    assert any("not finite" in verdict.message or "nan" in verdict.message for verdict in failed)


@pytest.mark.parametrize("place", ["before_bias", "after_bias"])
@pytest.mark.parametrize("cap", [0.3, 2.0, 1e3])
def test_oracle_is_what_autograd_gives(place: Any, cap: float) -> None:
    generator = torch.Generator().manual_seed(0)
    config = Config(d_model=6, n_heads=2, d_head=None).of_heads()
    q, k, v = (
        torch.randn(2, 5, 6, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    )
    bias = torch.randn(1, 1, 5, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    problem = Problem(
        config, Weights.identity(config, q.dtype, q.device), q, k, v, Options(bias, softcap=cap)
    )
    claims = Claims(
        masks={"float"}, projections=False, scores=Scores(softcap=place), returns_weights=False
    )
    heads = [x.unflatten(-1, (2, 3)).transpose(1, 2) for x in (q, k, v)]
    scores = heads[0] @ heads[1].mT * 3**-0.5
    scores = tanh_of(scores + bias, cap) if place == "after_bias" else tanh_of(scores, cap) + bias
    expected = (scores.softmax(-1) @ heads[2]).transpose(1, 2).flatten(2)
    upstream = torch.randn(2, 5, 6, generator=generator, dtype=torch.float64)
    expected.backward(upstream)
    found, output = gradients(problem, claims, upstream), oracle(problem, claims).output
    assert ((output.mid - expected).abs() <= 1e-14 + output.rad).all()
    for name, leaf in (("query", q), ("key", k), ("value", v), ("mask", bias)):
        assert torch.allclose(found[name].mid, leaf.grad, rtol=1e-10, atol=1e-12), name
        assert float(found[name].rad.max()) < (1e-10 if cap < 10 else 1e-8)
