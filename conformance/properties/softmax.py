"""SMX: softmax normalisation."""

from __future__ import annotations

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, DENSE, EVERYDAY, MODERATE, Domain
from mha.conformance.cases.masks import BOOLEAN, FEW, FLOAT
from mha.conformance.cases.transforms import passing_heads
from mha.conformance.harness.assertions import expect, expect_agree, expect_close
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.shared import weights_of
from mha.spec.bounds import Ball
from mha.spec.dtypes import TRAITS

MASKS = ("none", *BOOLEAN, *FLOAT)


@property_of(
    "SMX-1",
    Domain(masks=MASKS, causal=BOTH, values=EVERYDAY, need_weights=(True,)),
    needs="returns_weights",
    must_reject=("noise", "zeros"),
)
def weights_are_shares_of_one(session: Session, case: Case) -> None:
    problem = case.problem()
    answer, weights = session.expected(problem), weights_of(session(problem))
    seen = weights.tensor.double()
    outside = ((seen < 0) | (seen > 1 + answer.weights.rad)) & ~answer.empty.unsqueeze(-1)
    if bool(outside.any()):
        at = tuple(outside.nonzero()[0].tolist())
        message = f"{weights[at].code} is {float(seen[at]):.9g}, but a weight is in [0, 1], but for rounding"
        most = 1 + float(answer.weights.rad[at])
        expect(False, message, f"assert 0 <= {weights[at].code}.item() <= {most!r}, {weights[at].code}")
    expect_close(weights.row_sums(), answer.sums, because="a row of weights sums to 1")


@property_of(
    "SMX-2",
    Domain(masks=MASKS, causal=BOTH, values=EVERYDAY, need_weights=(True,)),
    needs="returns_weights",
    must_reject=("mean", "zeros", "unmasked", "unscaled"),
    min_rejection_rate=0.3,
)
def weights_are_the_softmax_over_keys(session: Session, case: Case) -> None:
    problem = case.problem()
    expected = session.expected(problem).weights
    expect_close(weights_of(session(problem)), expected, because="the softmax of the scores over the keys")


@property_of("SMX-3", Domain(masks=("none", *FEW), bias=(True,), values=MODERATE, layouts=DENSE))
def shift_of_all_scores_changes_nothing(session: Session, case: Case) -> None:
    problem = case.problem()
    b_k = problem.weights.b_k
    assert b_k is not None
    shift = 4 * torch.randn(b_k.shape, generator=case.generator, dtype=torch.float64)
    shifted = problem.change(b_k=b_k + shift.to(b_k))
    bounds = session.expected(shifted).output, session.expected(problem).output
    seen, expected = session(shifted).output, session(problem).output
    expect_agree(seen, expected, bounds=bounds, because="what another key bias gives, which adds q.b_k to every score")


@property_of(
    "SMX-4",
    Domain(masks=("none", *FEW), values=("large", "offset", "selection")),
    must_reject=("noise", "zeros"),
    min_rejection_rate=0.25,
)
def large_scores_do_not_overflow(session: Session, case: Case) -> None:
    problem = case.problem()
    factor = 1.0 if TRAITS[case.dtype].narrow else 2.0 ** (case.seed % 6)
    problem = passing_heads(problem.change(w_q=problem.weights.w_q * factor))
    weights = problem.weights
    if weights.b_v is not None:
        # Every value is 1, so that a context is the sum of its weights, which need not be returned.
        problem = problem.change(w_v=weights.w_v * 0, b_v=torch.ones_like(weights.b_v))
    seen = session(problem, need_weights=session.claims.returns_weights)
    output = seen.output
    answer = session.expected(problem)
    message = f"{output.code} has numbers that are not finite, though the inputs are"
    finite = output.tensor.isfinite() | answer.output.rad.isinf()
    expect(bool(finite.all()), message, f"assert {output.code}.isfinite().all(), {output.code}")
    told = "the oracle's value" if weights.b_v is None else "a sum of weights, each times 1, is 1"
    expect_close(output, answer.output, because=f"{told}, however large the scores")
    if seen.weights is not None:
        expect_close(seen.weights.row_sums(), answer.sums, because="a row sums to 1, however large its scores")


@property_of("SMX-5", Domain(masks=("none", *FEW), causal=BOTH, values=EVERYDAY), must_reject=("noise", "zeros"))
def context_is_among_the_values(session: Session, case: Case) -> None:
    problem = passing_heads(case.problem())
    answer, seen = session.expected(problem), session(problem).output
    allowed = problem.allowed(session.claims.causal).unsqueeze(-1)
    values = answer.value.mid.unsqueeze(2)
    infinity = float("inf")
    low = values.masked_fill(~allowed, infinity).amin(-2).transpose(1, 2).flatten(2)
    high = values.masked_fill(~allowed, -infinity).amax(-2).transpose(1, 2).flatten(2)
    filled = (~answer.empty).transpose(1, 2).repeat_interleave(case.head_dim, -1)
    nearest = torch.minimum(torch.maximum(seen.tensor.double(), low), high).where(filled, answer.output.mid)
    because = "a context lies between the smallest and largest allowed value"
    expect_close(seen, Ball(nearest, answer.output.rad), because=because)


@property_of(
    "SMX-6",
    Domain(min_head_dim=2, min_heads=2, min_S=2, values=("normal", "integers")),
    must_reject=("unscaled", "mean"),
)
def scores_are_scaled_by_the_root_of_head_dim(session: Session, case: Case) -> None:
    problem = case.problem()
    if session.claims.returns_weights:
        seen, expected = weights_of(session(problem, need_weights=True)), session.expected(problem).weights
    else:
        problem = passing_heads(problem)
        seen, expected = session(problem).output, session.expected(problem).output
    expect_close(seen, expected, because=f"scores scaled by 1/sqrt(d_k) with d_k = {case.head_dim}")
