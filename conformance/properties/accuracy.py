"""NUM: accuracy."""

from __future__ import annotations

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import ALL_LAYOUTS, BOTH, EVERYDAY, Domain
from mha.conformance.cases.masks import BOOLEAN, FLOAT
from mha.conformance.expect import expect_close
from mha.conformance.registry import checks
from mha.conformance.trial import Trial

ANYTHING = Domain(masks=("none", "all", *BOOLEAN, *FLOAT), causal=BOTH, regimes=EVERYDAY, layouts=ALL_LAYOUTS)


@checks("NUM-1", ANYTHING)
def results_are_within_the_bound(attention: Trial, case: Case) -> None:
    problem = case.problem()
    answer, seen = attention.answer(problem), attention(problem)
    expect_close(seen.output, answer.output, because="the oracle's value")
    if seen.weights is not None:
        expect_close(seen.weights, answer.weights, because="the oracle's value")


@checks("NUM-2", Domain(dtypes=("float64",), regimes=("normal", "heavy"), min_head_dim=2, min_S=2))
def double_precision_is_double_throughout(attention: Trial, case: Case) -> None:
    problem = case.problem()
    expected = attention.answer(problem).output
    expect_close(attention(problem).output, expected, because="the oracle's value; a float32 step would show here")
