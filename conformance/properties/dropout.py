"""DRP: dropout; and GRD-1, where gradients must drop what the outputs dropped."""

from __future__ import annotations

import traceback
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, MODERATE, Domain
from mha.conformance.cases.mask_kinds import BOOLEAN, COMMON, FEW, FLOAT
from mha.conformance.cases.memory_layouts import leaf_of
from mha.conformance.cases.transforms import passing_heads, with_dropout, with_width, zeroed
from mha.conformance.harness.assertions import assume, expect, expect_close, expect_equal
from mha.conformance.harness.differentiation import differentiate
from mha.conformance.harness.errors import CallRaised
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.domains import DROPOUT_PATTERNS, DROPOUT_SEEDS
from mha.conformance.properties.support.dropout_statistics import (
    LARGE_LENGTH,
    PROBABILITIES,
    expect_dropped_weights,
    expect_dropped_weights_and_outputs,
    expect_patterns_of_their_own,
    expect_share,
    expect_zero_or_rescaled,
    showing_dropped_weights,
)
from mha.conformance.properties.support.shared_assertions import assume_unquantised, weights_of
from mha.spec import Problem
from mha.spec.bounds import Ball, units_of

TRAINING = ("train",)
# S, by the seed of the case: beside tiles, and for heads as narrow as those of small models, whose
# d_k is 2 S + 1.
LENGTHS = (17, 65, 15, 65, 7, 65)
ONE_UNMASKED_PATTERN = replace(
    DROPOUT_PATTERNS, masks=("none",), causal=(False,), max_B=1, max_heads=1
)


@property_of(
    "DRP-1",
    Domain(masks=COMMON, causal=BOTH),
    needs="dropout",
    requires="HED-1",
    must_reject=("lopsided", "slightly_lopsided"),
)
def evaluation_and_zero_drop_nothing(session: Session, case: Case) -> None:
    """In eval mode, and with p = 0, dropout does nothing."""
    training = case.mode.startswith("train")
    dropout = 0.0 if training else PROBABILITIES[case.seed % 3]
    problem = with_dropout(case.problem(), dropout)
    because = f"the oracle's value without dropout, in mode {case.mode!r} with p = {dropout}"
    expect_close(session(problem).output, session.expected(problem).output, because=because)


@property_of(
    "DRP-2", DROPOUT_PATTERNS, needs="dropout=True", must_reject=("lopsided",), max_cases=12
)
def each_weight_is_dropped_alone_or_rescaled(session: Session, case: Case) -> None:
    """In training each weight is dropped on its own with probability p, and rescaled otherwise."""
    length = LENGTHS[case.seed % len(LENGTHS)]
    queries = length if case.inputs == "self" else length - 1
    for dropout in PROBABILITIES:
        problem = with_width(
            replace(case, L=queries, S=length), session.claims, 2 * length + 1
        ).problem()
        expect_dropped_weights(session, problem, dropout, case.seed)


@property_of("DRP-2", ONE_UNMASKED_PATTERN, needs="dropout=True", max_cases=1, number=2)
def the_share_that_is_dropped_is_p(session: Session, case: Case) -> None:
    """In training the share of dropped weights is p, so that the output is unbiased."""
    for length, dropout in product(
        (LARGE_LENGTH, 15), PROBABILITIES
    ):  # the latter for heads of an ordinary width
        problem = with_width(
            replace(case, L=length, S=length), session.claims, 2 * length
        ).problem()
        expect_dropped_weights(session, problem, dropout, case.seed)


@property_of(
    "DRP-2",
    DROPOUT_PATTERNS,
    needs="dropout=output",
    must_reject=("lopsided",),
    max_cases=12,
    number=3,
)
def each_output_is_dropped_alone_or_rescaled(session: Session, case: Case) -> None:
    """In training each output is dropped on its own with probability p, and rescaled otherwise."""
    for dropout in PROBABILITIES:
        _expect_dropped_outputs(session, case, 65 if case.seed % 2 else 17, dropout)


@property_of("DRP-2", ONE_UNMASKED_PATTERN, needs="dropout=output", max_cases=1, number=4)
def the_share_of_outputs_that_is_dropped_is_p(session: Session, case: Case) -> None:
    """In training the share of dropped outputs is p, so that the output is unbiased."""
    for dropout in PROBABILITIES:
        _expect_dropped_outputs(session, case, LARGE_LENGTH, dropout)


@property_of(
    "DRP-2",
    DROPOUT_PATTERNS,
    needs="dropout=both|each",
    must_reject=("lopsided",),
    max_cases=5,
    number=5,
)
def each_weight_and_each_output_is_dropped_alone(session: Session, case: Case) -> None:
    """In training each weight and each output is dropped on its own, or rescaled."""
    for dropout in PROBABILITIES:
        problem = with_width(replace(case, L=65, S=65), session.claims, 2 * 65).problem()
        expect_dropped_weights_and_outputs(session, problem, dropout, case.seed)


@property_of(
    "DRP-2",
    DROPOUT_PATTERNS,
    needs="dropout=each",
    must_reject=("lopsided",),
    max_cases=4,
    number=8,
)
def each_probability_is_of_its_own_place(session: Session, case: Case) -> None:
    """In training only weights are dropped where p is 0 for outputs, and the other way round."""
    problem = with_width(replace(case, L=17, S=17), session.claims, 2 * 17 + 1).problem()
    of_weights = problem.change(config=replace(problem.config, output_dropout=0.0))
    expect_dropped_weights(session, of_weights, 0.5, case.seed)
    _expect_dropped_outputs(session, case, 17, 0.5, of_weights=0.0)


def _expect_dropped_outputs(
    session: Session, case: Case, length: int, dropout: float, of_weights: float | None = None
) -> None:
    """Each output is dropped on its own with probability p; L = length, and D is at least that.

    of_weights: the probability of dropping a weight, if that is another one.
    """
    problem = with_width(replace(case, L=length, S=length), session.claims, length).problem()
    if of_weights is None:
        problem = with_dropout(problem, dropout)
    else:
        problem = problem.change(
            config=replace(problem.config, dropout=of_weights, output_dropout=dropout)
        )
    output, expected = session(problem, seed=case.seed).output, session.expected(problem).output
    for item in range(case.B):
        expect_zero_or_rescaled(
            session, output[item], expected[item], dropout, "the output in column"
        )
        expect_share(output[item], expected[item].mid != 0, dropout, ("rows", "columns"))


@property_of(
    "DRP-5",
    replace(DROPOUT_PATTERNS, min_heads=2),
    needs="dropout=True",
    must_reject=("shared_draws",),
    max_cases=4,
)
def heads_and_items_drop_independently(session: Session, case: Case) -> None:
    """In training no two heads, and no two items of a batch, drop the same weights."""
    length = LENGTHS[case.seed % len(LENGTHS)]
    queries = length if case.inputs == "self" else length - 1
    problem = with_width(
        replace(case, L=queries, S=length), session.claims, 2 * length + 1
    ).problem()
    for dropout in PROBABILITIES:
        expect_patterns_of_their_own(session, problem, dropout, case.seed)


@property_of(
    "DRP-5",
    replace(DROPOUT_PATTERNS, min_heads=2, variants=("grouped",)),
    needs=("grouped_query", "dropout=True"),
    requires="HED-1",
    must_reject=("shared_draws",),
    max_cases=4,
    number=2,
)
def grouped_heads_drop_independently(session: Session, case: Case) -> None:
    """In training no two heads that share a key and a value drop the same weights."""
    case = with_width(replace(case, L=17, S=17), session.claims, 34)
    expect_patterns_of_their_own(session, case.problem(), 0.5, case.seed)


@property_of("DRP-3", DROPOUT_SEEDS, needs="dropout", must_reject=("own_draws",))
def the_seed_decides_what_is_dropped(session: Session, case: Case) -> None:
    """The same seed gives the same result; another seed, or another call, gives another."""
    problem = with_dropout(case.problem(), 0.5)
    first, again, other = (session(problem, seed=seed).output for seed in (1, 1, 2))
    expect_equal(again, first, because="the seed is the same")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        one, following = session(problem).output, session(problem).output
    message = f"{following.code} equals {one.code}: two calls, one after the other, drop the same"
    expect(
        not torch.equal(one.tensor, following.tensor),
        message,
        f"assert not {one.code}.equal({following.code})",
    )
    message = f"{other.code} equals {first.code}, though the seeds differ"
    expect(
        not torch.equal(first.tensor, other.tensor),
        message,
        f"assert not {first.code}.equal({other.code})",
    )


@property_of(
    "DRP-3",
    Domain(masks=("none", *FEW), values=MODERATE, modes=TRAINING),
    needs="dropout",
    level="SHOULD",
    must_reject=(),
    number=2,
)
def dropping_everything_is_not_nan(session: Session, case: Case) -> None:
    """p = 1 gives NaN neither in the output nor in the gradients, or is refused at construction."""
    problem = with_dropout(case.problem(), 1.0)
    try:
        session.built(problem)
    except CallRaised as refused:
        if _is_raised_on_purpose(refused.error):
            return
        raise
    output = session(problem, seed=1).output
    gradients = (
        session.gradients(problem, session.upstream(problem)) if session.claims.gradients else {}
    )
    for result in (output, *gradients.values()):
        nan = bool(result.tensor.isnan().any())
        expect(
            not nan, f"{result.code} has NaN with p = 1", f"assert not {result.code}.isnan().any()"
        )


def _is_raised_on_purpose(error: BaseException) -> bool:
    """Return whether a statement raises it, unlike a division by zero or a logarithm of it."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return not {"raise", "assert"}.isdisjoint((last.line or "").split())


@property_of(
    "DRP-4",
    Domain(masks=("none", *BOOLEAN, *FLOAT), values=MODERATE, modes=TRAINING, need_weights=(True,)),
    needs=("dropout", "returns_weights"),
    requires="HED-1",
    must_reject=("lopsided",),
)
def returned_weights_are_those_before_dropout(session: Session, case: Case) -> None:
    """Returned weights are those before dropout."""
    problem = with_dropout(case.problem(), 0.5)
    weights = weights_of(session(problem, seed=1))
    expect_close(weights, session.expected(problem).weights, because="the weights before dropout")


@property_of(
    "GRD-1",
    replace(
        DROPOUT_PATTERNS, masks=("none",), causal=(False,), values=("integers",), modes=TRAINING
    ),
    needs=("dropout", "gradients"),
    must_reject=("drops_nothing_backward",),
    min_rejection_rate=0.5,  # in bfloat16 the bound of a sum is wide
    max_cases=12,
    number=7,
)
def gradients_drop_what_the_outputs_dropped(session: Session, case: Case) -> None:
    """In training the gradients drop what the outputs dropped.

    An output is linear in its values, so its sum against the upstream is the sum of the values
    against their gradient.
    """
    assume_unquantised(session)
    assume(
        case.config.kv_heads == case.n_heads,
        "heads that share a value have no columns of their own in it",
    )
    problem = with_dropout(passing_heads(case.problem()), 0.5)
    eye = torch.eye(problem.config.d_model, dtype=problem.query.dtype, device=case.device)
    problem = zeroed(problem, "w_q", "b_q", "b_v").change(w_v=eye).map_inputs(leaf_of)
    upstream = session.upstream(problem)
    output = _forward_and_backward(session, problem, upstream)
    gradient = problem.value.grad
    assert gradient is not None
    sums = [
        (x.detach().double() * y.detach().double()).sum(1)
        for x, y in ((output, upstream), (problem.value, gradient))
    ]
    slack, (upstreams, values) = (
        _slack(session, problem),
        _magnitudes(case, upstream, problem.value),
    )
    reach = 2 * (upstreams * (slack @ values)).sum(2).flatten(1)
    result = session.unscripted(sums[1], "(value * value.grad).sum(1)")
    expect_close(
        result,
        Ball(sums[0], reach),
        because="(output * upstream).sum(1), since what is dropped is the same",
    )
    if (
        session.claims.weight_gradients and session.claims.dropout is True
    ):  # of the weights, so before W_o
        error = 2 * (slack @ values).transpose(1, 2).flatten(2)
        _expect_dropped_contexts(session, problem, Ball(output.detach().double(), error), upstream)


@property_of(
    "GRD-1",
    replace(DROPOUT_PATTERNS, modes=TRAINING, dtypes=BOUNDED, need_weights=(False,)),
    needs=("dropout=True", "gradients"),
    requires="HED-1",
    must_reject=("drops_nothing_backward",),
    max_cases=6,
    number=12,
)
def gradients_of_scores_drop_what_the_outputs_dropped(session: Session, case: Case) -> None:
    """In training, query and key have gradients of the weights that the outputs kept.

    Where an output is a weight, dropping that weight is dropping the gradient of that output.
    """
    length, p = 17, 0.5  # twice a number is exact
    case = replace(case, L=length if case.inputs == "self" else length - 1, S=length)
    case = with_width(case, session.claims, 2 * length)
    problem = showing_dropped_weights(
        session, with_dropout(case.problem(), p), uniform=False
    ).map_inputs(leaf_of)
    upstream = session.upstream(problem)
    output = _forward_and_backward(session, problem, upstream)
    kept = upstream * (output.detach() != 0) / (1 - p)
    expected = session.expected_gradients(problem, kept)
    found = {
        name: leaf.grad for name, leaf in problem.distinct().items() if leaf is not problem.value
    }
    if session.claims.weight_gradients:
        gradients = session.weight_gradients(session.built(problem), problem.weights)
        found |= {name: x.tensor for name, x in gradients.items() if name[2:] in ("q", "k")}
    assume(bool(found), "all inputs are one tensor, and the gradients of weights are not reported")
    without = session.expected_gradients(problem, upstream)
    shows = any(_stand_apart(expected[name], without[name]) for name in found)
    assume(shows, "rounding, as it is declared, may hide whether the gradients dropped anything")
    for name, gradient in found.items():
        result = session.unscripted(
            torch.zeros(()) if gradient is None else gradient, f"{name}.grad"
        )
        expect_close(
            result,
            expected[name],
            because="the gradient of the weights that were kept, with p = 0.5",
        )


def _stand_apart(one: Ball, other: Ball) -> bool:
    """Return whether two bounds, each twice as wide, exclude one another somewhere."""
    return bool(((one.mid - other.mid).abs() > 2 * (one.rad + other.rad)).any())


def _forward_and_backward(session: Session, problem: Problem, upstream: Tensor) -> Tensor:
    """Return the output of a call with the seed of the case, after its backward pass."""
    session.built(problem)  # now, since a construction may draw random numbers
    with torch.random.fork_rng():
        torch.manual_seed(session.case.seed)
        output = session.forward(problem)
    with guarded("backward()"):
        differentiate(output, upstream)
    return output


def _slack(session: Session, problem: Problem) -> Tensor:
    """Return how far a weight may be off in either direction, (B, H, L, S).

    In each direction a dropped or doubled weight carries its own error and that of the sums that it
    enters.
    """
    units, weights = (
        units_of(problem.query.dtype, session.claims.rounding),
        session.expected(problem).weights,
    )
    terms = problem.query.shape[1] + problem.key.shape[1] + 2 * problem.config.d_model + 8
    return 2 * (weights.rad + (units.products(terms) + 4 * units.store) * weights.size)


def _magnitudes(case: Case, *tensors: Tensor) -> list[Tensor]:
    """Return the absolute values of tensors (B, length, D) by heads, (B, H, length, d_k)."""
    heads = case.n_heads, case.head_dim
    return [x.detach().double().abs().unflatten(-1, heads).transpose(1, 2) for x in tensors]


def _expect_dropped_contexts(
    session: Session, problem: Problem, output: Ball, upstream: Tensor
) -> None:
    """The gradient of W_o is that of contexts after dropout: the outputs, as W_o is the identity.

    output: (B, L, D), with the error of contexts that are computed again.
    """
    units = units_of(problem.query.dtype, session.claims.rounding)
    arrived, items = upstream.double().flatten(0, 1), len(upstream)
    contexts, error = output.mid.flatten(0, 1), output.rad.flatten(0, 1)
    # A pass for each item may be stored; output and context may each be rounded once more.
    relative = units.products(len(contexts) + items) + (items + 3) * units.store
    reach = arrived.mT.abs() @ (error + relative * (contexts.abs() + error))
    reach += len(contexts) * (units.flush + units.subnormal)
    gradient = session.weight_gradients(session.built(problem), problem.weights)["w_o"]
    expect_close(
        gradient,
        Ball(arrived.mT @ contexts, reach),
        because="upstream.T @ output, as W_o is the identity",
    )
