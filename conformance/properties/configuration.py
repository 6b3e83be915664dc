"""CFG: which configurations can be built."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.claimed import sorted_biases
from mha.conformance.cases.domain import DENSE, Domain
from mha.conformance.cases.transforms import with_config
from mha.conformance.harness.assertions import (
    assume,
    expect,
    expect_agree,
    expect_close,
    expect_raises,
)
from mha.conformance.harness.errors import AdapterError, CallRaised, Discard, Violation
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.recording import RecordedTensor
from mha.conformance.harness.session import Instance, Session
from mha.conformance.properties.registry import property_of
from mha.implementations import UnsupportedCallError
from mha.implementations.adapters.module import ModuleImplementation
from mha.implementations.discovery.resolve import original_of
from mha.spec import Config, Problem, Weights

UNCHECKED = ("never_refuses",)
# Only the configuration matters here.
CONSTRUCTION = Domain(
    values=("normal",), layouts=DENSE, modes=("eval",), need_weights=(False,), inputs=("self",)
)


@property_of(
    "CFG-1",
    replace(CONSTRUCTION, min_heads=2),
    needs=("projections", "own_head_dim=False"),
    must_reject=UNCHECKED,
)
def indivisible_width_gives_no_result(session: Session, case: Case) -> None:
    """No call returns a result where d_model % n_heads != 0: it raises, or construction does."""
    excess = 1 + case.seed % (case.n_heads - 1)
    for width in (case.n_heads * case.head_dim + excess, excess):
        _expect_no_result(session, case, replace(case.config, d_model=width))


def _expect_no_result(session: Session, case: Case, config: Config) -> None:
    """Expect construction or the call to raise; the message says what was computed instead."""
    # A class that rounds the width of its heads, down or up, has projections of another width than
    # d_model.
    rounded = config.d_model // config.n_heads
    widths = [width for width in (rounded, rounded + 1) if width]
    configs = [config, *[replace(config, d_head=width) for width in widths]]
    for each in configs:
        try:
            computed = _computed(session, with_config(case, each))
        except CallRaised:
            return
        except AdapterError as failed:
            assume(not isinstance(failed.error, UnsupportedCallError), str(failed.error))
            continue  # weights of these sizes do not fit what was constructed
        break
    else:
        computed = _computed_as_constructed(session, with_config(case, config))
    if computed:
        message = f"{_indivisible(config)}, but a call returns a result: {computed}"
        raise Violation(message, (f"raise AssertionError({message!r})",))


def _computed(session: Session, problem: Problem) -> str:
    """Return in words what a call returns; raise AdapterError where no weights can be loaded."""
    try:
        return _computed_heads(session, problem, session(problem, need_weights=False).output)
    except CallRaised:
        raise
    except Violation as violation:
        return violation.message


def _computed_as_constructed(session: Session, problem: Problem) -> str:
    """Return in words what a module as constructed returns; "" if its call raises."""
    original, case = original_of(session.implementation), session.case
    if not isinstance(original, ModuleImplementation):
        raise Discard("weights of such sizes cannot be loaded into what was constructed")
    session.scripted = False  # no step of it builds this
    dtype = getattr(torch, case.dtype)
    with guarded("construction"):
        made = original.as_constructed(
            problem.config, problem.weights, dtype=dtype, device=case.device
        )
    try:
        output = session(problem, need_weights=False, via=Instance(0, made)).output
    except CallRaised:
        return ""
    except Violation as violation:
        return violation.message
    return f"an output of shape {tuple(output.tensor.shape)}"


def _computed_heads(session: Session, problem: Problem, output: RecordedTensor) -> str:
    """Return in words how many heads give an output."""
    config, n_heads = problem.config, problem.config.n_heads
    if config.d_head is not None:
        context = f"a context of {config.inner_width} numbers, not {config.d_model}"
        return f"{n_heads} heads of width {config.d_head}, so {context}"
    # What a view of heads of that width gives comes first: where S = 1, any number of heads does.
    usual = config.d_model // max(config.d_model // n_heads, 1)
    # Weights of norms, and of keys that heads share, are for heads of one width.
    if config.norm_weights or config.kv_heads != n_heads:
        return f"an output of shape {tuple(output.tensor.shape)}"
    for other in (usual, *range(1, config.d_model + 1)):
        if other == n_heads or config.d_model % other:
            continue
        expected = session.expected(problem.change(config=replace(config, n_heads=other))).output
        if bool(((output.tensor.double() - expected.mid).abs() <= expected.rad).all()):
            heads = "one head" if other == 1 else f"{other} heads"
            return f"that of {heads} of width {config.d_model // other}, not of {n_heads} heads"
    return f"an output of shape {tuple(output.tensor.shape)}"


@property_of(
    "CFG-2",
    replace(CONSTRUCTION, min_heads=2),
    needs=("projections", "own_head_dim=False"),
    must_reject=UNCHECKED,
)
def error_is_a_value_error_with_both_numbers(session: Session, case: Case) -> None:
    """Construction with d_model % n_heads != 0 raises a ValueError that names both numbers."""
    width = case.n_heads * case.head_dim + 1 + case.seed % (case.n_heads - 1)
    config = replace(case.config, d_model=width)
    error = _expect_rejected(session, config, _indivisible(config))
    raised = f"{type(error).__name__}: {error}"
    has_both = {str(config.d_model), str(config.n_heads)} <= set(re.findall(r"\d+", str(error)))
    expect(
        isinstance(error, ValueError) and has_both,
        f"construction raised {raised[:200]!r}, but should raise a ValueError whose message"
        f" contains both d_model ({config.d_model}) and n_heads ({config.n_heads})",
    )


@property_of("CFG-3", CONSTRUCTION, needs="projections", must_reject=UNCHECKED)
def non_positive_sizes_are_rejected(session: Session, case: Case) -> None:
    """A d_model or n_heads that is not positive raises at construction."""
    width, heads = case.config.d_model, case.n_heads
    one_is_zero = [(width, 0), (0, heads)]
    negative = [(width, -heads), (-width, heads), (-width, -heads)]
    for d_model, n_heads in (*one_is_zero, *negative, (0, 0)):
        config = replace(case.config, d_model=d_model, n_heads=n_heads)
        because = f"d_model ({d_model}) and n_heads ({n_heads}) must be positive"
        _expect_rejected(session, config, because)


@property_of("CFG-4", CONSTRUCTION, must_reject=("zeros", "mean", "lopsided", "slightly_lopsided"))
def every_divisor_is_right_or_refused(session: Session, case: Case) -> None:
    """Each n_heads that divides d_model, 1 and d_model too, gives right results or is refused."""
    for problem in _with_each_divisor(session, case):
        try:
            session.built(problem)
        except CallRaised:
            continue
        because = f"{problem.config.n_heads} heads divide d_model = {problem.config.d_model}"
        expect_close(session(problem).output, session.expected(problem).output, because=because)


@property_of("CFG-4", CONSTRUCTION, level="SHOULD", must_reject=(), number=2)
def every_divisor_is_accepted(session: Session, case: Case) -> None:
    """Every n_heads that divides d_model is accepted at construction."""
    for problem in _with_each_divisor(session, case):
        session.built(problem)


def _with_each_divisor(session: Session, case: Case) -> Iterator[Problem]:
    """Yield the problem of a case with every claimed number of heads that divides d_model."""
    problem = case.problem()
    width = problem.config.d_model
    for n_heads in range(1, width + 1):
        if width % n_heads:
            continue
        config = replace(case.config, n_heads=n_heads)
        lengths = case.L, case.S
        if session.claims.sizes.refused(n_heads=n_heads, head_dim=config.head_dim, lengths=lengths):
            continue
        if config.n_kv_heads is None and not config.norm_weights:
            yield problem.change(config=config)
        else:  # the width of shared keys and values, and of norms, depends on the number of heads
            yield with_config(case, config)


@property_of(
    "CFG-5",
    replace(CONSTRUCTION, inputs=("cross", "self"), bias=(False,)),
    needs=("projections", "bias=False"),
)
def no_bias_equals_zero_biases(session: Session, case: Case) -> None:
    """bias=False has no bias parameter, and equals the same weights with all biases zero."""
    without = case.problem()
    weights, biased = without.weights, sorted_biases(session.claims)[0]
    assume(bool(biased), "needs a claim of biases, to compare with")
    config = replace(without.config, bias=biased)
    zeros = {}
    for role in "qkvo":
        if config.has_bias(role):
            matrix = getattr(weights, f"w_{role}")
            zeros[f"b_{role}"] = matrix.new_zeros(len(matrix))
    with_zeros = without.change(config=config, **zeros)
    _expect_fewer_parameters(session, without, with_zeros)
    bounds = session.bound_of(without), session.bound_of(with_zeros)
    expected = session(with_zeros).output
    because = "the result with all biases zero"
    expect_agree(session(without).output, expected, *bounds, because=because)


def _expect_fewer_parameters(session: Session, without: Problem, biased: Problem) -> None:
    """Expect a module without biases to have as many parameters less as another one has biases."""
    fewer = _parameter_count(session.built(without).attention)
    more = _parameter_count(session.built(biased).attention)
    # Without weight gradients, the parameters may be anything.
    if fewer is None or more is None or not session.claims.weight_gradients:
        return
    matrices = sum(tensor.numel() for _, tensor in without.weights.named())
    biases = sum(tensor.numel() for _, tensor in biased.weights.named()) - matrices
    # With bias=True, it may still have no key bias, which changes no result.
    has_fewer_biases = more < matrices + biases and fewer <= matrices
    expect(
        fewer == more - biases or has_fewer_biases,
        f"the parameters hold {fewer} numbers with bias=False and {more} with bias=True,"
        f" {biases} of them biases",
        "count = lambda attention: sum(p.numel() for p in getattr(attention, 'module',"
        " attention).parameters())",
        f"assert count(attention_1) == count(attention_2) - {biases}",
    )


@property_of("CFG-6", CONSTRUCTION, needs=("projections", "dropout"), must_reject=UNCHECKED)
def invalid_dropout_is_rejected(session: Session, case: Case) -> None:
    """A dropout below 0 or above 1 raises at construction."""
    for dropout in (-0.1, 1.5, -math.inf, math.inf):
        config = replace(case.config, dropout=dropout)
        _expect_rejected(session, config, f"dropout ({dropout}) is not a probability")


def _expect_rejected(session: Session, config: Config, because: str) -> BaseException:
    """Expect construction to raise; return the exception."""
    weights = Weights.random(config, session.case.seed).to(
        getattr(torch, session.case.dtype), session.case.device
    )
    return expect_raises(partial(session.build, config, weights), because=because)


def _indivisible(config: Config) -> str:
    return f"d_model ({config.d_model}) is not divisible by n_heads ({config.n_heads})"


def _parameter_count(attention: object) -> int | None:
    """Count the numbers in a module's parameters, in an adapter too; None without a module."""
    module = getattr(attention, "module", attention)
    if not isinstance(module, torch.nn.Module):
        return None
    return sum(p.numel() for p in module.parameters())
