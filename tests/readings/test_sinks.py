"""Sinks: inference finds them and their dtype, and each head has its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Claims, Config, Options, Problem, Scores, Weights, gradients, oracle
from support.judging import expect_conforms, expect_fail

CLAUSES = ["SNK-1", "SNK-2", "EFF-1"]


def sunk(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if sinks is None:
        return scores.softmax(-1) @ v
    column = sinks.to(scores).view(-1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def in_any_dtype(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None = None) -> Tensor:
    return sunk(q, k, v, s_aux)


def in_the_dtype(q: Tensor, k: Tensor, v: Tensor, learnable_sink: Tensor | None = None) -> Tensor:
    if learnable_sink is not None and learnable_sink.dtype != q.dtype:
        raise TypeError(f"learnable_sink must be {q.dtype}")
    return sunk(q, k, v, learnable_sink)


def ignored(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    return sunk(q, k, v, None)


def of_the_first_head(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    return sunk(q, k, v, None if sinks is None else sinks[:1].expand_as(sinks))


@pytest.mark.parametrize(("kernel", "dtype"), [(in_any_dtype, "float32"), (in_the_dtype, "input")])
def test_sinks_are_found_and_conform(kernel: Callable[..., Tensor], dtype: Any) -> None:
    inference = infer_kernel(kernel)
    assert inference.implementation.claims.scores == Scores(sinks=dtype)
    expect_conforms(inference, CLAUSES, dtypes=["float32", "bfloat16"])


def required(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    return sunk(q, k, v, sinks)


def test_sinks_that_each_call_requires_are_none_where_a_call_has_none() -> None:
    inference = infer_kernel(required)
    assert inference.implementation.claims.scores == Scores(sinks="float32")
    assert "given None" not in inference.report()
    assert inference.not_covered == ()


def test_sinks_without_an_effect_are_said() -> None:
    inference = infer_kernel(ignored)
    assert "sinks has no effect" in inference.report()
    expect_fail(inference, "EFF-1")


def test_sink_of_another_head_is_named() -> None:
    inference = infer_kernel(of_the_first_head)
    assert "assumed by its name" in " ".join(inference.report().split())
    verdict = expect_fail(inference, "SNK-1")
    assert "the sink of the first head is that of every head" in verdict.diagnosis


def with_the_sink(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, has_sink: bool = True
) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    lse = scores.logsumexp(-1)
    if sinks is not None and has_sink:
        lse = torch.logaddexp(lse, sinks.to(lse).view(-1, 1))
    return sunk(q, k, v, sinks), lse.to(torch.promote_types(q.dtype, torch.float32))


def without_the_sink(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return with_the_sink(q, k, v, sinks, has_sink=False)


@pytest.mark.parametrize(("kernel", "has_sink"), [(with_the_sink, True), (without_the_sink, False)])
def test_log_sum_exp_has_the_sink_or_not(kernel: Callable[..., Any], has_sink: bool) -> None:
    inference = infer_kernel(kernel)
    lse = inference.implementation.claims.lse
    assert lse is not None
    assert lse.sink is has_sink
    expect_conforms(inference, ["LSE-1", "SNK-1"])


@pytest.mark.parametrize("masked", [False, True])
def test_oracle_is_what_autograd_gives(masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    config = Config(d_model=6, n_heads=2).of_heads()
    q, k, v = (
        torch.randn(2, 5, 6, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    )
    sinks = torch.tensor([0.75, -1.5], dtype=torch.float64, requires_grad=True)
    mask = (torch.rand(1, 1, 5, 5, generator=generator) < 0.6) if masked else None
    if mask is not None:
        mask[..., 2, :] = False  # a row without a key
    options = Options(mask, sinks=tuple(sinks.tolist()))
    problem = Problem(config, Weights.identity(config, q.dtype, q.device), q, k, v, options)
    claims = Claims(projections=False, scores=Scores(sinks="float32"), returns_weights=False)
    heads = [x.unflatten(-1, (2, 3)).transpose(1, 2) for x in (q, k, v)]
    scores = heads[0] @ heads[1].mT * 3**-0.5
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    extended = torch.cat([scores, sinks.view(-1, 1, 1).expand(2, 2, 5, 1)], -1)
    expected = (extended.softmax(-1)[..., :-1] @ heads[2]).transpose(1, 2).flatten(2)
    upstream = torch.randn(2, 5, 6, generator=generator, dtype=torch.float64)
    expected.backward(upstream)
    found, solved = gradients(problem, claims, upstream), oracle(problem, claims)
    assert ((solved.output.mid - expected).abs() <= 1e-14 + solved.output.rad).all()
    assert solved.weights.mid.shape == (2, 2, 5, 5)
    assert torch.allclose(solved.lse.mid, extended.logsumexp(-1))
    for name, leaf in (("query", q), ("key", k), ("value", v), ("sinks", sinks)):
        assert torch.allclose(found[name].mid, leaf.grad, rtol=1e-10, atol=1e-12), name
        assert float(found[name].rad.max()) < 1e-10
