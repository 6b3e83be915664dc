"""NUM: accuracy; long rows (NUM-5) have a module of their own."""

from __future__ import annotations

from dataclasses import replace

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import ALL_LAYOUTS, BOTH, EVERYDAY, FEW_LAYOUTS, HALF, MODERATE, Domain
from mha.conformance.cases.masks import BOOLEAN, FEW, FLOAT
from mha.conformance.cases.reference import plain_formula
from mha.conformance.harness.assertions import expect_close, expect_no_worse, need
from mha.conformance.harness.isolation import threads
from mha.conformance.harness.session import Trial
from mha.conformance.properties.registry import checks
from mha.conformance.properties.shared import expect_answer

WRONGS = ("mean", "zeros", "unmasked", "unscaled")
# Enough numbers that a root mean square is no matter of luck.
MANY = Domain(dtypes=HALF, regimes=("normal",), min_heads=2, min_head_dim=8, min_B=2, min_L=8, min_S=8)
ANYTHING = Domain(masks=("none", "all", *BOOLEAN, *FLOAT), causal=BOTH, regimes=EVERYDAY, layouts=ALL_LAYOUTS)


@checks("NUM-1", ANYTHING, rejects=WRONGS, floor=0.3)
def results_are_within_the_bound(attention: Trial, case: Case) -> None:
    problem = case.problem()
    expect_answer(attention(problem), attention.answer(problem), "the oracle's value")


# More items and heads than other cases have, and masks that differ by them.
MANY_OF_EACH = Domain(
    masks=("items", "full", "head_keys", "heads", "head_bias", "full_bias"),
    causal=BOTH,
    regimes=MODERATE,
    layouts=FEW_LAYOUTS,
    min_B=9,
    max_B=9,
    min_heads=17,
    max_heads=17,
    max_length=9,
)


@checks("NUM-1", MANY_OF_EACH, after="HED-1", rejects=WRONGS, floor=0.3, limit=12, number=2)
def results_for_many_items_and_heads_are_within_the_bound(attention: Trial, case: Case) -> None:
    results_are_within_the_bound(attention, case)


EVERYDAY_SIZES = Domain(
    scale="wide",
    masks=("none", "padding", "blocks", "full", "bias", "head_bias"),
    causal=BOTH,
    regimes=MODERATE,
    inputs=("cross", "self"),
)


@checks("NUM-1", EVERYDAY_SIZES, after="HED-1", rejects=WRONGS, floor=0.3, limit=6, number=3)
def results_of_everyday_sizes_are_within_the_bound(attention: Trial, case: Case) -> None:
    problem = case.problem()
    expect_answer(attention(problem), attention.answer(problem), "the oracle's value")


@checks(
    "NUM-1",
    replace(EVERYDAY_SIZES, masks=("none", "padding"), paths=("no_grad", "train")),
    after="HED-1",
    rejects=WRONGS,
    floor=0.3,
    limit=2,
    number=4,
)
def results_on_several_threads_are_within_the_bound(attention: Trial, case: Case) -> None:
    problem = replace(case, L=min(case.S, 65), S=min(case.S, 65)).problem()
    with threads(3):  # which leaves a remainder of most lengths
        seen = attention(problem)
    expect_answer(seen, attention.answer(problem), "the oracle's value, on three threads")


@checks(
    "NUM-2",
    Domain(dtypes=("float64",), regimes=("normal", "heavy"), min_head_dim=2, min_S=2),
    rejects=("single",),
)
def double_precision_is_double_throughout(attention: Trial, case: Case) -> None:
    need(not attention.claims.rounding.softmax_in_float32, "the softmax is declared to be in float32")
    problem = case.problem()
    expected = attention.answer(problem).output
    expect_close(attention(problem).output, expected, because="the oracle's value; a float32 step would show here")


@checks("NUM-3", replace(MANY, masks=("none", *FEW), causal=BOTH), rejects=("noise", "zeros"))
def half_precision_is_no_worse_than_the_plain_formula(attention: Trial, case: Case) -> None:
    expect_no_worse_than_plain(attention, case)


def expect_no_worse_than_plain(attention: Trial, case: Case) -> None:
    """The root mean square error of the output is at most twice that of the plain formula in the same dtype."""
    problem = case.problem()
    right, seen = attention.answer(problem), attention(problem).output
    filled = (~right.empty).all(1)
    plain = plain_formula(problem, problem.allowed(attention.claims.causal))
    expect_no_worse(seen.code, seen.tensor[filled], plain[filled], right.output.mid[filled])


@checks(
    "NUM-4",
    Domain(dtypes=("float16",), masks=BOOLEAN, causal=BOTH, regimes=("normal", "large")),
    rejects=WRONGS,
    floor=0.3,
)
def masks_work_in_half_precision(attention: Trial, case: Case) -> None:
    problem = case.problem()
    because = "the oracle's value; a fill such as -1e9 is no float16 number"
    expect_close(attention(problem).output, attention.answer(problem).output, because=because)


@checks(
    "NUM-6", Domain(masks=("none", *FEW), regimes=("tiny", "huge", "heavy"), causal=BOTH), rejects=("zeros", "noise")
)
def very_small_and_very_large_inputs(attention: Trial, case: Case) -> None:
    problem = case.problem()
    seen, answer = attention(problem), attention.answer(problem)
    expect_close(seen.output, answer.output, because=f"the oracle's value for {case.regime} inputs")
