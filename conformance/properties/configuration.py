"""CFG: what can be constructed."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import DENSE, Domain
from mha.conformance.harness.assertions import expect, expect_agree, expect_close, expect_raises
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.spec import Config, Weights

UNCHECKED = ("never_refuses",)
# Nothing but the configuration matters here.
CONSTRUCTION = Domain(values=("normal",), layouts=DENSE, modes=("eval",), need_weights=(False,), inputs=("self",))


def _refused(session: Session, config: Config, because: str) -> BaseException:
    weights = Weights.random(config, session.case.seed).to(getattr(torch, session.case.dtype), session.case.device)
    return expect_raises(partial(session.build, config, weights), because=because)


@property_of("CFG-1", replace(CONSTRUCTION, min_heads=2), must_reject=UNCHECKED)
def indivisible_width_is_refused(session: Session, case: Case) -> None:
    excess = 1 + case.seed % (case.n_heads - 1)
    for width in (case.n_heads * case.head_dim + excess, excess):
        config = Config(width, case.n_heads, bias=case.bias)
        _refused(session, config, f"n_heads ({config.n_heads}) does not divide d_model ({config.d_model})")


@property_of("CFG-2", replace(CONSTRUCTION, min_heads=2), must_reject=UNCHECKED)
def refusal_names_both_numbers(session: Session, case: Case) -> None:
    width = case.n_heads * case.head_dim + 1 + case.seed % (case.n_heads - 1)
    config = Config(width, case.n_heads, bias=case.bias)
    error = _refused(session, config, f"n_heads ({config.n_heads}) does not divide d_model ({config.d_model})")
    told = f"{type(error).__name__}: {error}"
    numbers = {str(config.d_model), str(config.n_heads)} <= set(re.findall(r"\d+", str(error)))
    expect(
        isinstance(error, ValueError) and numbers,
        f"the refusal is {told[:200]!r}, but should be a ValueError that has {config.d_model} and {config.n_heads}",
    )


@property_of("CFG-3", CONSTRUCTION, must_reject=UNCHECKED)
def non_positive_sizes_are_refused(session: Session, case: Case) -> None:
    width, heads = case.config.d_model, case.n_heads
    wrong = ((width, 0), (0, heads), (width, -heads), (-width, heads), (-width, -heads), (0, 0))
    for d_model, n_heads in wrong:
        config = Config(d_model, n_heads, bias=case.bias)
        _refused(session, config, f"d_model ({d_model}) and n_heads ({n_heads}) must be positive")


@property_of("CFG-4", CONSTRUCTION, must_reject=("zeros", "mean", "noise"))
def every_divisor_is_accepted(session: Session, case: Case) -> None:
    problem = case.problem()
    width = problem.config.d_model
    for n_heads in (heads for heads in range(1, width + 1) if width % heads == 0):
        config = Config(width, n_heads, bias=case.bias)
        changed = problem.change(config=config)
        expected = session.expected(changed).output
        expect_close(session(changed).output, expected, because=f"{n_heads} heads divide d_model = {width}")


@property_of("CFG-5", replace(CONSTRUCTION, inputs=("cross", "self"), bias=(False,)), needs=("bias=True", "bias=False"))
def no_bias_equals_zero_biases(session: Session, case: Case) -> None:
    plain = case.problem()
    weights = plain.weights
    zeros = {
        f"b_{role}": getattr(weights, f"w_{role}").new_zeros(len(getattr(weights, f"w_{role}"))) for role in "qkvo"
    }
    config = Config(plain.config.d_model, plain.config.n_heads, bias=True)
    zeroed = plain.change(config=config, **zeros)
    few, many = (_parameters(session.built(problem).attention) for problem in (plain, zeroed))
    if few is not None and many is not None and session.claims.weight_gradients:  # else parameters may be anything
        taken = sum(len(zero) for zero in zeros.values())
        products = sum(tensor.numel() for _, tensor in weights.named())
        expect(
            few == many - taken or (many < products + taken and few <= products),  # it may hold no key bias at all
            f"with bias=False it has {few} numbers as parameters, with biases {many}, of which {taken} are biases",
            "count = lambda attention: sum(p.numel() for p in getattr(attention, 'module', attention).parameters())",
            f"assert count(attention_1) == count(attention_2) - {taken}",
        )
    bounds = session.expected(plain).output, session.expected(zeroed).output
    with_zeros = session(zeroed).output
    expect_agree(session(plain).output, with_zeros, bounds=bounds, because="what zero biases give")


@property_of("CFG-6", CONSTRUCTION, needs="dropout", must_reject=UNCHECKED)
def impossible_dropout_is_refused(session: Session, case: Case) -> None:
    for dropout in (-0.1, 1.5, math.nan, -math.inf, math.inf):
        config = replace(case.config, dropout=dropout)
        _refused(session, config, f"dropout ({dropout}) is no probability")


def _parameters(built: object) -> int | None:
    """Count the numbers in the parameters of a module, or of the module that an adapter holds."""
    module = getattr(built, "module", built)
    return sum(p.numel() for p in module.parameters()) if isinstance(module, torch.nn.Module) else None
