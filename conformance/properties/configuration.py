"""CFG: which configurations can be built."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import DENSE, Domain, sorted_biases
from mha.conformance.cases.transforms import with_config
from mha.conformance.harness.assertions import assume, expect, expect_agree, expect_close, expect_raises
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.spec import Config, Weights

UNCHECKED = ("never_refuses",)
# Only the configuration matters here.
CONSTRUCTION = Domain(values=("normal",), layouts=DENSE, modes=("eval",), need_weights=(False,), inputs=("self",))


@property_of("CFG-1", replace(CONSTRUCTION, min_heads=2), needs="own_head_dim=False", must_reject=UNCHECKED)
def indivisible_width_is_rejected(session: Session, case: Case) -> None:
    """Construction with d_model % n_heads != 0 raises, before any forward pass."""
    excess = 1 + case.seed % (case.n_heads - 1)
    for width in (case.n_heads * case.head_dim + excess, excess):
        config = replace(case.config, d_model=width)
        _expect_rejected(session, config, _indivisible(config))


@property_of("CFG-2", replace(CONSTRUCTION, min_heads=2), needs="own_head_dim=False", must_reject=UNCHECKED)
def error_is_a_value_error_with_both_numbers(session: Session, case: Case) -> None:
    """That exception is a ValueError whose message contains d_model and n_heads."""
    width = case.n_heads * case.head_dim + 1 + case.seed % (case.n_heads - 1)
    config = replace(case.config, d_model=width)
    error = _expect_rejected(session, config, _indivisible(config))
    raised = f"{type(error).__name__}: {error}"
    has_both = {str(config.d_model), str(config.n_heads)} <= set(re.findall(r"\d+", str(error)))
    expect(
        isinstance(error, ValueError) and has_both,
        f"construction raised {raised[:200]!r}, but should raise a ValueError whose message contains both "
        f"d_model ({config.d_model}) and n_heads ({config.n_heads})",
    )


@property_of("CFG-3", CONSTRUCTION, must_reject=UNCHECKED)
def non_positive_sizes_are_rejected(session: Session, case: Case) -> None:
    """A d_model or n_heads that is not positive raises at construction."""
    width, heads = case.config.d_model, case.n_heads
    for d_model, n_heads in ((width, 0), (0, heads), (width, -heads), (-width, heads), (-width, -heads), (0, 0)):
        config = replace(case.config, d_model=d_model, n_heads=n_heads)
        _expect_rejected(session, config, f"d_model ({d_model}) and n_heads ({n_heads}) must be positive")


@property_of("CFG-4", CONSTRUCTION, must_reject=("zeros", "mean", "noise"))
def every_divisor_is_accepted(session: Session, case: Case) -> None:
    """Every n_heads that divides d_model is accepted, including 1 and d_model."""
    problem = case.problem()
    width = problem.config.d_model
    for n_heads in (heads for heads in range(1, width + 1) if width % heads == 0):
        config = replace(case.config, n_heads=n_heads)
        if session.claims.sizes.refused(n_heads=n_heads, head_dim=config.head_dim, lengths=(case.L, case.S)):
            continue
        # Where heads share key and value, their width depends on the number of heads.
        changed = problem.change(config=config) if config.n_kv_heads is None else with_config(case, config)
        expected = session.expected(changed).output
        expect_close(session(changed).output, expected, because=f"{n_heads} heads divide d_model = {width}")


@property_of("CFG-5", replace(CONSTRUCTION, inputs=("cross", "self"), bias=(False,)), needs="bias=False")
def no_bias_equals_zero_biases(session: Session, case: Case) -> None:
    """bias=False has no bias parameter, and equals the same weights with all biases zero."""
    without = case.problem()
    weights, biased = without.weights, sorted_biases(session.claims)[0]
    assume(bool(biased), "needs a claim of biases, to compare with")
    config = replace(without.config, bias=biased)
    matrices_of = {role: getattr(weights, f"w_{role}") for role in "qkvo" if config.has_bias(role)}
    zeros = {f"b_{role}": matrix.new_zeros(len(matrix)) for role, matrix in matrices_of.items()}
    with_zeros = without.change(config=config, **zeros)
    fewer, more = (_parameter_count(session.built(problem).attention) for problem in (without, with_zeros))
    # Without weight gradients, the parameters may be anything.
    if fewer is not None and more is not None and session.claims.weight_gradients:
        biases = sum(zero.numel() for zero in zeros.values())
        matrices = sum(tensor.numel() for _, tensor in weights.named())
        # With bias=True, it may still have no key bias, which changes no result.
        expect(
            fewer == more - biases or (more < matrices + biases and fewer <= matrices),
            f"the parameters hold {fewer} numbers with bias=False and {more} with bias=True, {biases} of them biases",
            "count = lambda attention: sum(p.numel() for p in getattr(attention, 'module', attention).parameters())",
            f"assert count(attention_1) == count(attention_2) - {biases}",
        )
    bounds, expected = map(session.bound_of, (without, with_zeros)), session(with_zeros).output
    expect_agree(session(without).output, expected, *bounds, because="the result with all biases zero")


@property_of("CFG-6", CONSTRUCTION, needs="dropout", must_reject=UNCHECKED)
def invalid_dropout_is_rejected(session: Session, case: Case) -> None:
    """A dropout below 0 or above 1 raises at construction."""
    for dropout in (-0.1, 1.5, -math.inf, math.inf):
        config = replace(case.config, dropout=dropout)
        _expect_rejected(session, config, f"dropout ({dropout}) is not a probability")


def _expect_rejected(session: Session, config: Config, because: str) -> BaseException:
    """Expect construction to raise; return the exception."""
    weights = Weights.random(config, session.case.seed).to(getattr(torch, session.case.dtype), session.case.device)
    return expect_raises(partial(session.build, config, weights), because=because)


def _indivisible(config: Config) -> str:
    return f"d_model ({config.d_model}) is not divisible by n_heads ({config.n_heads})"


def _parameter_count(attention: object) -> int | None:
    """Count the numbers in the parameters of a module, or of the one that an adapter wraps; None without a module."""
    module = getattr(attention, "module", attention)
    return sum(p.numel() for p in module.parameters()) if isinstance(module, torch.nn.Module) else None
