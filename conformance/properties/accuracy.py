"""NUM: accuracy; long rows (NUM-5) have a module of their own."""

from __future__ import annotations

from dataclasses import replace

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import ALL_LAYOUTS, BOTH, EVERYDAY, FEW_LAYOUTS, HALF, MODERATE, Domain
from mha.conformance.cases.masks import BOOLEAN, FEW, FLOAT
from mha.conformance.cases.reference import plain_formula
from mha.conformance.harness.assertions import assume, expect_close, expect_no_worse
from mha.conformance.harness.isolation import threads
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.shared import expect_result

WRONGS = ("mean", "zeros", "unmasked", "unscaled")
# Enough numbers that a root mean square is no matter of luck.
MANY = Domain(dtypes=HALF, values=("normal",), min_heads=2, min_head_dim=8, min_B=2, min_L=8, min_S=8)
ANYTHING = Domain(masks=("none", "all", *BOOLEAN, *FLOAT), causal=BOTH, values=EVERYDAY, layouts=ALL_LAYOUTS)


@property_of("NUM-1", ANYTHING, must_reject=WRONGS, min_rejection_rate=0.3)
def results_are_within_the_bound(session: Session, case: Case) -> None:
    problem = case.problem()
    expect_result(session(problem), session.expected(problem), "the oracle's value")


# More items and heads than other cases have, and masks that differ by them.
MANY_OF_EACH = Domain(
    masks=("items", "full", "head_keys", "heads", "head_bias", "full_bias"),
    causal=BOTH,
    values=MODERATE,
    layouts=FEW_LAYOUTS,
    min_B=9,
    max_B=9,
    min_heads=17,
    max_heads=17,
    max_length=9,
)


@property_of(
    "NUM-1", MANY_OF_EACH, requires="HED-1", must_reject=WRONGS, min_rejection_rate=0.3, max_cases=12, number=2
)
def results_for_many_items_and_heads_are_within_the_bound(session: Session, case: Case) -> None:
    results_are_within_the_bound(session, case)


EVERYDAY_SIZES = Domain(
    scale="wide",
    masks=("none", "padding", "blocks", "full", "bias", "head_bias"),
    causal=BOTH,
    values=MODERATE,
    inputs=("cross", "self"),
)


@property_of(
    "NUM-1", EVERYDAY_SIZES, requires="HED-1", must_reject=WRONGS, min_rejection_rate=0.3, max_cases=6, number=3
)
def results_of_everyday_sizes_are_within_the_bound(session: Session, case: Case) -> None:
    problem = case.problem()
    expect_result(session(problem), session.expected(problem), "the oracle's value")


@property_of(
    "NUM-1",
    replace(EVERYDAY_SIZES, masks=("none", "padding"), modes=("no_grad", "train")),
    requires="HED-1",
    must_reject=WRONGS,
    min_rejection_rate=0.3,
    max_cases=2,
    number=4,
)
def results_on_several_threads_are_within_the_bound(session: Session, case: Case) -> None:
    problem = replace(case, L=min(case.S, 65), S=min(case.S, 65)).problem()
    with threads(3):  # which leaves a remainder of most lengths
        seen = session(problem)
    expect_result(seen, session.expected(problem), "the oracle's value, on three threads")


@property_of(
    "NUM-2",
    Domain(dtypes=("float64",), values=("normal", "heavy"), min_head_dim=2, min_S=2),
    must_reject=("single_precision",),
)
def double_precision_is_double_throughout(session: Session, case: Case) -> None:
    assume(not session.claims.rounding.softmax_in_float32, "the softmax is declared to be in float32")
    problem = case.problem()
    expected = session.expected(problem).output
    expect_close(session(problem).output, expected, because="the oracle's value; a float32 step would show here")


@property_of("NUM-3", replace(MANY, masks=("none", *FEW), causal=BOTH), must_reject=("noise", "zeros"))
def half_precision_is_no_worse_than_the_plain_formula(session: Session, case: Case) -> None:
    expect_no_worse_than_plain(session, case)


def expect_no_worse_than_plain(session: Session, case: Case) -> None:
    """The root mean square error of the output is at most twice that of the plain formula in the same dtype."""
    problem = case.problem()
    right, seen = session.expected(problem), session(problem).output
    filled = (~right.empty).all(1)
    plain = plain_formula(problem, problem.allowed(session.claims.causal))
    expect_no_worse(seen.code, seen.tensor[filled], plain[filled], right.output.mid[filled])


@property_of(
    "NUM-4",
    Domain(dtypes=("float16",), masks=BOOLEAN, causal=BOTH, values=("normal", "large")),
    must_reject=WRONGS,
    min_rejection_rate=0.3,
)
def masks_work_in_half_precision(session: Session, case: Case) -> None:
    problem = case.problem()
    because = "the oracle's value; a fill such as -1e9 is no float16 number"
    expect_close(session(problem).output, session.expected(problem).output, because=because)


@property_of(
    "NUM-6", Domain(masks=("none", *FEW), values=("tiny", "huge", "heavy"), causal=BOTH), must_reject=("zeros", "noise")
)
def very_small_and_very_large_inputs(session: Session, case: Case) -> None:
    problem = case.problem()
    seen, answer = session(problem), session.expected(problem)
    expect_close(seen.output, answer.output, because=f"the oracle's value for {case.values} inputs")
