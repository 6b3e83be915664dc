"""MSK-11: masks of numbers that are added to the scores."""

from __future__ import annotations

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, MODERATE, WIDE_RANGE, Domain
from mha.conformance.cases.masks import BOOLEAN, FLOAT
from mha.conformance.cases.transforms import passing_heads
from mha.conformance.harness.assertions import expect_agree, expect_close
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.spec import to_convention


@property_of("MSK-11", Domain(masks=("all", *BOOLEAN), causal=BOTH, passes=("bool", "float")))
def additive_and_boolean_masks_agree(session: Session, case: Case) -> None:
    problem = case.problem()
    assert problem.mask is not None
    additive = problem.change(mask=to_convention(problem.mask, "additive", problem.query.dtype))
    bound = session.expected(problem).output
    seen, expected = session(additive).output, session(problem).output
    expect_agree(seen, expected, bounds=(bound, bound), because="what the boolean form of the mask gives")


@property_of(
    "MSK-11",
    Domain(masks=FLOAT, values=MODERATE, min_S=2),
    requires="HED-1",
    must_reject=("unmasked", "zeros"),
    number=2,
)
def additive_mask_is_a_bias_on_the_scores(session: Session, case: Case) -> None:
    problem = case.problem()
    expected = session.expected(problem).output
    expect_close(session(problem).output, expected, because="the mask's finite numbers are added to the scores")


LOWEST = Domain(passes=("float",), min_S=2, bias=(True,), values=MODERATE, dtypes=WIDE_RANGE)


@property_of("MSK-11", LOWEST, requires="HED-1", must_reject=("zeros", "noise"), number=3)
def the_lowest_number_is_no_infinity(session: Session, case: Case) -> None:
    """A row of nothing else is no empty row: where every value is 1, its context is 1."""
    problem = passing_heads(case.problem())
    assert problem.weights.b_v is not None
    problem = problem.change(w_v=problem.weights.w_v * 0, b_v=torch.ones_like(problem.weights.b_v))
    lowest = torch.finfo(problem.query.dtype).min
    mask = torch.zeros(1, 1, case.L, case.S, dtype=problem.query.dtype, device=problem.query.device)
    mask[..., torch.rand(mask.shape[2:], generator=case.generator) < 0.5] = lowest
    if session.claims.rounding.log_normaliser:
        mask[..., 0] = 0.0  # beside a log-sum-exp of such a size all else is lost
    else:
        mask[:, :, case.seed % case.L] = lowest
    # Whatever the scores are, a row of weights sums to 1, rounded as without the mask.
    expected = session.expected(problem).output
    seen = session(problem.change(mask=mask)).output
    expect_close(seen, expected, because=f"with {lowest:.3g} in the mask, each row of weights sums to 1")
