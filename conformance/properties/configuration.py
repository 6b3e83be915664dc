"""CFG: what can be constructed."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import DENSE, Domain
from mha.conformance.harness.assertions import expect, expect_agree, expect_close, expect_raises, need
from mha.conformance.harness.session import Trial
from mha.conformance.properties.registry import checks
from mha.spec import Config, Weights

UNCHECKED = ("unchecked",)
# Nothing but the configuration matters here.
CONSTRUCTION = Domain(regimes=("normal",), layouts=DENSE, paths=("eval",), need_weights=(False,), inputs=("self",))


def _refused(attention: Trial, config: Config, because: str) -> BaseException:
    weights = Weights.random(config, attention.case.seed).to(
        getattr(torch, attention.case.dtype), attention.case.device
    )
    return expect_raises(partial(attention.build, config, weights), because=because)


@checks("CFG-1", replace(CONSTRUCTION, min_heads=2), rejects=UNCHECKED)
def indivisible_width_is_refused(attention: Trial, case: Case) -> None:
    excess = 1 + case.seed % (case.n_heads - 1)
    for width in (case.n_heads * case.head_dim + excess, excess):
        config = Config(width, case.n_heads, bias=case.bias)
        _refused(attention, config, f"n_heads ({config.n_heads}) does not divide d_model ({config.d_model})")


@checks("CFG-2", replace(CONSTRUCTION, min_heads=2), rejects=UNCHECKED)
def refusal_names_both_numbers(attention: Trial, case: Case) -> None:
    width = case.n_heads * case.head_dim + 1 + case.seed % (case.n_heads - 1)
    config = Config(width, case.n_heads, bias=case.bias)
    error = _refused(attention, config, f"n_heads ({config.n_heads}) does not divide d_model ({config.d_model})")
    told = f"{type(error).__name__}: {error}"
    numbers = {str(config.d_model), str(config.n_heads)} <= set(re.findall(r"\d+", str(error)))
    expect(
        isinstance(error, ValueError) and numbers,
        f"the refusal is {told[:200]!r}, but should be a ValueError that has {config.d_model} and {config.n_heads}",
    )


@checks("CFG-3", CONSTRUCTION, rejects=UNCHECKED)
def non_positive_sizes_are_refused(attention: Trial, case: Case) -> None:
    width, heads = case.config.d_model, case.n_heads
    wrong = ((width, 0), (0, heads), (width, -heads), (-width, heads), (-width, -heads), (0, 0))
    for d_model, n_heads in wrong:
        config = Config(d_model, n_heads, bias=case.bias)
        _refused(attention, config, f"d_model ({d_model}) and n_heads ({n_heads}) must be positive")


@checks("CFG-4", CONSTRUCTION, rejects=("zeros", "mean", "noise"))
def every_divisor_is_accepted(attention: Trial, case: Case) -> None:
    problem = case.problem()
    width = problem.config.d_model
    for n_heads in (heads for heads in range(1, width + 1) if width % heads == 0):
        config = Config(width, n_heads, bias=case.bias)
        changed = problem.change(config=config)
        expected = attention.answer(changed).output
        expect_close(attention(changed).output, expected, because=f"{n_heads} heads divide d_model = {width}")


@checks("CFG-5", replace(CONSTRUCTION, inputs=("cross", "self"), bias=(False,)))
def no_bias_equals_zero_biases(attention: Trial, case: Case) -> None:
    need(set(attention.claims.bias) == {True, False}, "needs the claim bias={True, False}")
    plain = case.problem()
    weights = plain.weights
    zeros = {
        f"b_{role}": getattr(weights, f"w_{role}").new_zeros(len(getattr(weights, f"w_{role}"))) for role in "qkvo"
    }
    config = Config(plain.config.d_model, plain.config.n_heads, bias=True)
    zeroed = plain.change(config=config, **zeros)
    few, many = (_parameters(attention.built(problem).attention) for problem in (plain, zeroed))
    if few is not None and many is not None and attention.claims.weight_gradients:  # else parameters may be anything
        taken = sum(len(zero) for zero in zeros.values())
        products = sum(tensor.numel() for _, tensor in weights.named())
        expect(
            few == many - taken or (many < products + taken and few <= products),  # it may hold no key bias at all
            f"with bias=False it has {few} numbers as parameters, with biases {many}, of which {taken} are biases",
            "count = lambda attention: sum(p.numel() for p in getattr(attention, 'module', attention).parameters())",
            f"assert count(attention_1) == count(attention_2) - {taken}",
        )
    bounds = attention.answer(plain).output, attention.answer(zeroed).output
    with_zeros = attention(zeroed).output
    expect_agree(attention(plain).output, with_zeros, bounds=bounds, because="what zero biases give")


@checks("CFG-6", CONSTRUCTION, needs="dropout", rejects=UNCHECKED)
def impossible_dropout_is_refused(attention: Trial, case: Case) -> None:
    for dropout in (-0.1, 1.5, math.nan, -math.inf, math.inf):
        config = replace(case.config, dropout=dropout)
        _refused(attention, config, f"dropout ({dropout}) is no probability")


def _parameters(built: object) -> int | None:
    """Count the numbers in the parameters of a module, or of the module that an adapter holds."""
    module = getattr(built, "module", built)
    return sum(p.numel() for p in module.parameters()) if isinstance(module, torch.nn.Module) else None
