"""MSK-11: masks of numbers that are added to the scores."""

from __future__ import annotations

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, MODERATE, NOT_FLOAT16, Domain
from mha.conformance.cases.masks import BOOLEAN, FLOAT
from mha.conformance.cases.transforms import passing_heads
from mha.conformance.harness.assertions import expect_agree, expect_close
from mha.conformance.harness.session import Trial
from mha.conformance.properties.registry import checks
from mha.spec import to_convention


@checks("MSK-11", Domain(masks=("all", *BOOLEAN), causal=BOTH, passes=("bool", "float")))
def additive_and_boolean_masks_agree(attention: Trial, case: Case) -> None:
    problem = case.problem()
    assert problem.mask is not None
    additive = problem.change(mask=to_convention(problem.mask, "additive", problem.query.dtype))
    bound = attention.answer(problem).output
    seen, expected = attention(additive).output, attention(problem).output
    expect_agree(seen, expected, bounds=(bound, bound), because="what the boolean form of the mask gives")


@checks(
    "MSK-11", Domain(masks=FLOAT, regimes=MODERATE, min_S=2), after="HED-1", rejects=("unmasked", "zeros"), number=2
)
def additive_mask_is_a_bias_on_the_scores(attention: Trial, case: Case) -> None:
    problem = case.problem()
    expected = attention.answer(problem).output
    expect_close(attention(problem).output, expected, because="the mask's finite numbers are added to the scores")


LOWEST = Domain(passes=("float",), min_S=2, bias=(True,), regimes=MODERATE, dtypes=NOT_FLOAT16)


@checks("MSK-11", LOWEST, after="HED-1", rejects=("zeros", "noise"), number=3)
def the_lowest_number_is_no_infinity(attention: Trial, case: Case) -> None:
    """A row of nothing else is no empty row: where every value is 1, its context is 1."""
    problem = passing_heads(case.problem())
    assert problem.weights.b_v is not None
    problem = problem.change(w_v=problem.weights.w_v * 0, b_v=torch.ones_like(problem.weights.b_v))
    lowest = torch.finfo(problem.query.dtype).min
    mask = torch.zeros(1, 1, case.L, case.S, dtype=problem.query.dtype, device=problem.query.device)
    mask[..., torch.rand(mask.shape[2:], generator=case.generator) < 0.5] = lowest
    if attention.claims.rounding.log_normaliser:
        mask[..., 0] = 0.0  # beside a log-sum-exp of such a size all else is lost
    else:
        mask[:, :, case.seed % case.L] = lowest
    # Whatever the scores are, a row of weights sums to 1, rounded as without the mask.
    expected = attention.answer(problem).output
    seen = attention(problem.change(mask=mask)).output
    expect_close(seen, expected, because=f"with {lowest:.3g} in the mask, each row of weights sums to 1")
