"""DRP: dropout; and GRD-1, where gradients must drop what the outputs dropped."""

from __future__ import annotations

import traceback
from dataclasses import replace
from itertools import product

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, MODERATE, Domain
from mha.conformance.cases.mask_kinds import BOOLEAN, COMMON, FEW, FLOAT
from mha.conformance.cases.transforms import with_dropout, with_width
from mha.conformance.harness.assertions import expect, expect_close, expect_equal
from mha.conformance.harness.errors import CallRaised
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.domains import DROPOUT_PATTERNS, DROPOUT_SEEDS
from mha.conformance.properties.support.dropout_gradients import (
    expect_gradients_of_kept_values,
    expect_gradients_of_kept_weights,
)
from mha.conformance.properties.support.dropout_statistics import (
    LARGE_LENGTH,
    PROBABILITIES,
    expect_dropped_weights,
    expect_dropped_weights_and_outputs,
    expect_patterns_of_their_own,
    expect_share,
    expect_zero_or_rescaled,
)
from mha.conformance.properties.support.shared_assertions import weights_of

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
    # The shorter length is for heads of an ordinary width.
    for length, dropout in product((LARGE_LENGTH, 15), PROBABILITIES):
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


@property_of(
    "DRP-2",
    replace(
        DROPOUT_PATTERNS,
        masks=("none",),
        windows=((8, 0), (3, 2), (None, 4)),
        softcaps=(None, 1.0),
        scales=(None, 2.0),
    ),
    needs=("dropout=True", "scores.window"),
    requires="WIN-1",
    must_reject=("lopsided",),
    max_cases=4,
    number=9,
)
def each_weight_of_a_window_is_dropped_alone(session: Session, case: Case) -> None:
    """In training with a window, its weights are dropped as any other ones are."""
    case = with_width(replace(case, L=17, S=17), session.claims, 2 * 17 + 1)
    expect_dropped_weights(session, case.problem(), 0.5, case.seed)


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
    output = session(problem, seed=case.seed).output
    expected = session.expected(problem).output
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
    first = session(problem, seed=1).output
    again = session(problem, seed=1).output
    other = session(problem, seed=2).output
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
    results = [session(problem, seed=1).output]
    if session.claims.gradients:
        results += session.gradients(problem, session.upstream(problem)).values()
    for result in results:
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
    expect_gradients_of_kept_values(session, case)


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
    expect_gradients_of_kept_weights(session, case)
