"""SMX: softmax normalisation."""

from __future__ import annotations

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, DENSE, MODERATE, MOST_VALUES, Domain
from mha.conformance.cases.mask_kinds import FEW, NO_EMPTY_ROWS
from mha.conformance.cases.transforms import passing_heads, weights_in, with_weights_as_output
from mha.conformance.harness.assertions import expect, expect_agree, expect_close
from mha.conformance.harness.errors import Violation
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import UNCHANGED_HEADS, property_of
from mha.conformance.properties.support.shared_assertions import (
    assume_finite,
    assume_unquantised,
    weights_of,
)
from mha.spec.bounds import Ball
from mha.spec.dtypes import TRAITS

# Where no weights are returned: values are one-hot, so that the contexts show them.
SHOWN_WEIGHTS = Domain(masks=NO_EMPTY_ROWS, causal=BOTH, values=MODERATE, max_length=17)


@property_of(
    "SMX-1",
    Domain(masks=NO_EMPTY_ROWS, causal=BOTH, values=MOST_VALUES, need_weights=(True,)),
    needs="returns_weights",
    must_reject=("lopsided", "zeros"),
)
def weights_are_probabilities(session: Session, case: Case) -> None:
    """Every weight is in [0, 1], up to rounding, and every row with an allowed key sums to 1."""
    problem = case.problem()
    weights, expected = weights_of(session(problem)), session.expected(problem)
    tensor = weights.tensor.double()
    outside = ((tensor < 0) | (tensor > 1 + expected.weights.rad)) & ~expected.empty.unsqueeze(-1)
    if bool(outside.any()):
        at = tuple(outside.nonzero()[0].tolist())
        code, largest = weights[at].code, 1 + float(expected.weights.rad[at])
        raise Violation(
            f"{code} is {float(tensor[at]):.9g}, but should be in [0, 1], up to rounding",
            (f"assert 0 <= {code}.item() <= {largest!r}, {code}",),
        )
    expect_close(weights.row_sums(), expected.sums, because="each row of weights sums to 1")


@property_of(
    "SMX-2",
    Domain(masks=NO_EMPTY_ROWS, causal=BOTH, values=MOST_VALUES, need_weights=(True,)),
    needs="returns_weights",
    must_reject=("mean", "zeros", "unmasked", "unscaled"),
)
def weights_are_the_softmax_over_keys(session: Session, case: Case) -> None:
    """The softmax runs over the keys: the weights match the oracle's, row by row."""
    problem = case.problem()
    actual = weights_of(session(problem))
    expected = session.expected(problem).weights
    expect_close(actual, expected, because="the softmax of the scores over the keys")


@property_of(
    "SMX-1",
    SHOWN_WEIGHTS,
    needs="returns_weights=False",
    must_reject=("lopsided", "zeros"),
    number=2,
)
def weights_that_the_context_shows_are_probabilities(session: Session, case: Case) -> None:
    """Where no weights are returned, one-hot values show them: probabilities in each row."""
    problem = with_weights_as_output(case, session.claims)
    output, expected = session(problem).output, session.expected(problem)
    weights, reach = (weights_in(x, problem) for x in (output.tensor.double(), expected.output.rad))
    outside = ((weights < 0) | (weights > 1 + reach)) & ~expected.empty.unsqueeze(-1)
    if bool(outside.any()):
        item, head, query, key = outside.nonzero()[0].tolist()
        at = output[item, query, head * problem.config.head_dim + key]
        message = (
            f"{at.code}, the weight of key {key}, is {float(at.tensor):.9g}, but should be in"
            " [0, 1]"
        )
        expect(
            False,
            message,
            f"assert 0 <= {at.code} <= {1 + float(reach[item, head, query, key])!r}, {at.code}",
        )
    _, heads, _, keys = problem.shape
    code = f"{{}}.unflatten(-1, ({heads}, {problem.config.head_dim})).transpose(1, 2)[..., :{keys}]"
    sums = output.map(lambda x: weights_in(x, problem), code).row_sums()
    filled = (~expected.empty).double()
    expect_close(
        sums,
        Ball(sums.tensor.where(expected.empty, filled), reach.sum(-1)),
        because="each row sums to 1",
    )


@property_of(
    "SMX-2",
    SHOWN_WEIGHTS,
    needs="returns_weights=False",
    must_reject=("mean", "zeros", "unscaled"),
    number=2,
)
def weights_that_the_context_shows_are_the_softmax(session: Session, case: Case) -> None:
    """Where no weights are returned, one-hot values show them: they match the oracle's."""
    problem = with_weights_as_output(case, session.claims)
    actual = session(problem).output
    expected = session.expected(problem).output
    expect_close(actual, expected, because="the weights, as each value is one-hot")


@property_of(
    "SMX-3",
    Domain(masks=("none", *FEW), bias=("k",), values=MODERATE, layouts=DENSE),
    needs=("projections", *UNCHANGED_HEADS),
)
def shift_of_all_scores_changes_nothing(session: Session, case: Case) -> None:
    """One constant added to all scores of a row changes nothing; another b_k adds q.b_k."""
    problem = case.problem()
    b_k = problem.weights.b_k
    assert b_k is not None
    shift = 4 * torch.randn(b_k.shape, generator=case.generator, dtype=torch.float64)
    shifted = problem.change(b_k=b_k + shift.to(b_k))
    output, expected = session(shifted).output, session(problem).output
    because = "the result for another key bias, which shifts all scores of a row by the same amount"
    expect_agree(output, expected, *map(session.bound_of, (shifted, problem)), because=because)


@property_of(
    "SMX-4",
    Domain(masks=("none", *FEW), values=("large", "offset", "selection")),
    must_reject=("lopsided", "slightly_lopsided", "zeros"),
)
def large_scores_do_not_overflow(session: Session, case: Case) -> None:
    """Finite inputs whose scores reach thousands give finite outputs and weights that sum to 1."""
    problem = case.problem()
    factor = 1.0 if TRAITS[case.dtype].narrow else 2.0 ** (case.seed % 6)
    problem = passing_heads(problem.change(w_q=problem.weights.w_q * factor))
    assume_finite(session, problem)
    weights = problem.weights
    if weights.b_v is not None:
        # All values are 1, so a context is the sum of its weights, even if these are not returned.
        problem = problem.change(w_v=weights.w_v * 0, b_v=torch.ones_like(weights.b_v))
    result = session(problem, need_weights=session.claims.returns_weights)
    output = result.output
    expected = session.expected(problem)
    message = f"{output.code} has NaN or infinite elements, but all inputs are finite"
    finite = output.tensor.isfinite() | expected.output.rad.isinf()
    expect(bool(finite.all()), message, f"assert {output.code}.isfinite().all(), {output.code}")
    value = "the oracle's value"
    if weights.b_v is not None:
        value = "all values are 1, so contexts are sums of weights"
    expect_close(output, expected.output, because=f"{value}, with large scores")
    if result.weights is not None:
        because = "each row of weights sums to 1, with large scores"
        expect_close(result.weights.row_sums(), expected.sums, because=because)


@property_of(
    "SMX-5",
    Domain(masks=("none", *FEW), causal=BOTH, values=MOST_VALUES),
    must_reject=("lopsided",),
)
def context_is_among_the_values(session: Session, case: Case) -> None:
    """Each head's context is in the convex hull of the allowed values, coordinate by coordinate."""
    problem = passing_heads(case.problem())
    output, expected = session(problem).output, session.expected(problem)
    allowed = problem.allowed(session.claims.alignment).unsqueeze(-1)
    values = expected.value.mid.unsqueeze(2)
    infinity = float("inf")
    low = values.masked_fill(~allowed, infinity).amin(-2).transpose(1, 2).flatten(2)
    high = values.masked_fill(~allowed, -infinity).amax(-2).transpose(1, 2).flatten(2)
    has_key = (~expected.empty).transpose(1, 2).repeat_interleave(case.head_dim, -1)
    nearest = torch.minimum(torch.maximum(output.tensor.double(), low), high).where(
        has_key, expected.output.mid
    )
    because = "a context lies between the smallest and the largest allowed value"
    expect_close(output, Ball(nearest, expected.output.rad), because=because)


@property_of(
    "SMX-6",
    Domain(min_head_dim=2, min_heads=2, min_S=2, values=("normal", "integers")),
    must_reject=("unscaled", "mean"),
)
def scores_are_scaled_as_claimed(session: Session, case: Case) -> None:
    """Scores are scaled by the claimed scale: 1/sqrt(d_k), unless another one is claimed."""
    assume_unquantised(session)
    problem = case.problem()
    if session.claims.returns_weights:
        actual = weights_of(session(problem, need_weights=True))
        expected = session.expected(problem).weights
    else:
        problem = passing_heads(problem)
        actual, expected = session(problem).output, session.expected(problem).output
    scale = f"1/sqrt(d_k), with d_k = {case.head_dim}"
    if session.claims.scale is not None:
        scale = f"{session.claims.scale}, the scale that is claimed"
    expect_close(actual, expected, because=f"scores are scaled by {scale}")
