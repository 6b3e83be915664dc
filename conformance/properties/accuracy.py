"""NUM: accuracy; long rows (NUM-5) are in a module of their own."""

from __future__ import annotations

from dataclasses import replace

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import (
    ALL_LAYOUTS,
    BOTH,
    FEW_LAYOUTS,
    MODERATE,
    MOST_VALUES,
    Domain,
)
from mha.conformance.cases.mask_kinds import BOOLEAN, FEW, FLOAT
from mha.conformance.cases.transforms import passing_heads, with_width, zeroed
from mha.conformance.harness.assertions import assume, expect_close
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import UNCHANGED_HEADS, property_of
from mha.conformance.properties.support.domains import (
    EVERYDAY_INFERENCE,
    EVERYDAY_SIZES,
    MANY_ELEMENTS_IN_HALF,
    ONE_OF_EACH_WIDTH,
    WIDE_HEADS,
)
from mha.conformance.properties.support.shared_assertions import (
    cases_of_each_width,
    expect_no_worse_than_plain,
    expect_result,
)
from mha.implementations.process.torch_state import threads

FORWARD_DEFECTS = ("lopsided", "slightly_lopsided", "unmasked", "slightly_scaled", "one_weight")


@property_of(
    "NUM-1",
    Domain(
        masks=("none", "all", *BOOLEAN, *FLOAT),
        causal=BOTH,
        values=MOST_VALUES,
        layouts=ALL_LAYOUTS,
    ),
    must_reject=FORWARD_DEFECTS,
)
def results_are_within_the_bound(session: Session, case: Case) -> None:
    """Output and weights are within the bound of the oracle."""
    _expect_within_the_bound(session, case)


@property_of(
    "NUM-1",
    Domain(masks=("none", "padding", "keys"), causal=BOTH, values=MODERATE),
    needs="declares_softmax=False",
    requires="HED-1",
    must_reject=FORWARD_DEFECTS,
    level="SHOULD",
    max_cases=30,
    number=10,
)
def results_are_within_the_bound_of_a_plain_softmax(session: Session, case: Case) -> None:
    """With no declaration about the softmax, results are within the bound of a plain one."""
    problem, claims = case.problem(), session.claims
    plain = replace(claims, rounding=claims.rounding.of_plain_softmax)
    because = (
        "the oracle's value, with the bound of a plain softmax: declare Rounding(...) if it rounds"
        " more"
    )
    expect_result(session(problem), session.expected(problem, plain), because)


# Of a head, where there are more heads than in large models: the time that weights take grows with
# its square.
WIDEST_OF_MANY = 32
# More items and heads than other cases have, and masks that differ by them.
MANY_ITEMS_AND_HEADS = Domain(
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
    "NUM-1",
    MANY_ITEMS_AND_HEADS,
    requires="HED-1",
    must_reject=FORWARD_DEFECTS,
    max_cases=12,
    number=2,
)
def results_for_many_items_and_heads_are_within_the_bound(session: Session, case: Case) -> None:
    """Output and weights are within the bound for many items and heads."""
    _expect_within_the_bound(session, case)


@property_of(
    "NUM-1",
    EVERYDAY_SIZES,
    requires="HED-1",
    must_reject=FORWARD_DEFECTS,
    max_cases=6,
    number=3,
)
def results_of_everyday_sizes_are_within_the_bound(session: Session, case: Case) -> None:
    """Output and weights are within the bound for the sizes of everyday models."""
    _expect_within_the_bound(session, case)


def _expect_within_the_bound(session: Session, case: Case) -> None:
    problem = case.problem()
    expect_result(session(problem), session.expected(problem), "the oracle's value")


@property_of(
    "NUM-1",
    replace(EVERYDAY_SIZES, masks=("none", "padding"), modes=("no_grad", "train")),
    requires="HED-1",
    must_reject=FORWARD_DEFECTS,
    max_cases=2,
    number=4,
)
def results_on_several_threads_are_within_the_bound(session: Session, case: Case) -> None:
    """Output and weights are within the bound if torch computes on several threads."""
    problem = replace(case, L=min(case.S, 65), S=min(case.S, 65)).problem()
    with threads(3):  # which do not divide most lengths
        result = session(problem)
    expect_result(result, session.expected(problem), "the oracle's value, on three threads")


@property_of(
    "NUM-1",
    replace(MANY_ITEMS_AND_HEADS, min_B=66, max_B=66),
    requires="HED-1",
    must_reject=FORWARD_DEFECTS,
    max_cases=4,
    number=5,
)
def results_for_more_than_1024_heads_of_a_batch_are_within_the_bound(
    session: Session, case: Case
) -> None:
    """Output and weights are within the bound for 66 items and 17 heads, each with its own mask."""
    _expect_within_the_bound(session, case)


@property_of(
    "NUM-1",
    WIDE_HEADS,
    requires="HED-1",
    must_reject=FORWARD_DEFECTS,
    max_cases=3,
    number=6,
)
def results_of_heads_wider_than_256_are_within_the_bound(session: Session, case: Case) -> None:
    """Output and weights are within the bound for heads wider than 256."""
    _expect_within_the_bound(session, case)


@property_of(
    "NUM-1",
    EVERYDAY_INFERENCE,
    requires="HED-1",
    must_reject=("lopsided", "mean"),
    max_cases=6,
    number=7,
)
def results_of_everyday_inference_are_within_the_bound(session: Session, case: Case) -> None:
    """The output is within the bound in plain inference, where fast paths are common."""
    _expect_within_the_bound(session, case)


@property_of(
    "NUM-1",
    ONE_OF_EACH_WIDTH,
    requires="HED-1",
    must_reject=("lopsided", "mean"),
    max_cases=1,
    number=8,
)
def results_of_each_width_of_heads_are_within_the_bound(session: Session, case: Case) -> None:
    """Output and weights are within the bound for each width that heads of known models have."""
    for each in cases_of_each_width(session, case):
        _expect_within_the_bound(session, each)


@property_of(
    "NUM-1",
    replace(MANY_ITEMS_AND_HEADS, min_B=1, max_B=2, min_heads=65, max_heads=65),
    requires="HED-1",
    must_reject=FORWARD_DEFECTS,
    max_cases=4,
    number=9,
)
def results_for_more_than_64_heads_are_within_the_bound(session: Session, case: Case) -> None:
    """Output and weights are within the bound for 65 heads, and masks that differ by them."""
    # Narrow, since the time that weights take grows with the square of d_model.
    sizes = session.claims.sizes
    case = replace(
        case, head_dim=sizes.fit_head_dim(1 if sizes.head_dims else min(case.head_dim, 3))
    )
    assume(case.head_dim <= WIDEST_OF_MANY, "d_model would be too large")
    _expect_within_the_bound(session, case)


@property_of(
    "NUM-2",
    Domain(dtypes=("float64",), values=("normal", "heavy"), min_head_dim=2, min_S=2),
    must_reject=("single_precision",),
)
def double_precision_is_double_throughout(session: Session, case: Case) -> None:
    """In float64 no constant and no intermediate is rounded to float32."""
    assume(not session.claims.narrows, "a step is declared to be in a narrower dtype")
    problem = case.problem()
    actual = session(problem).output
    expected = session.expected(problem).output
    expect_close(actual, expected, because="the oracle's value; a float32 step would show here")


@property_of(
    "NUM-3",
    replace(MANY_ELEMENTS_IN_HALF, masks=("none", *FEW), causal=BOTH),
    must_reject=("lopsided", "zeros"),
)
def half_precision_is_no_worse_than_the_plain_formula(session: Session, case: Case) -> None:
    """In half precision the root mean square error is at most twice that of the plain formula."""
    expect_no_worse_than_plain(session, case)


@property_of(
    "NUM-4",
    Domain(dtypes=("float16",), masks=BOOLEAN, causal=BOTH, values=("normal", "large")),
    must_reject=FORWARD_DEFECTS,
)
def masks_work_in_half_precision(session: Session, case: Case) -> None:
    """Masks work in float16, where a fill value of -1e9 does not fit."""
    problem = case.problem()
    because = "the oracle's value; a fill value such as -1e9 does not fit in float16"
    expect_close(session(problem).output, session.expected(problem).output, because=because)


@property_of(
    "NUM-6",
    Domain(masks=("none", *FEW), values=("tiny", "huge", "heavy"), causal=BOTH),
    must_reject=("zeros", "lopsided", "slightly_lopsided"),
)
def very_small_and_very_large_inputs(session: Session, case: Case) -> None:
    """Outputs for inputs of very small and of very large scale are within the bound."""
    problem = case.problem()
    output, expected = session(problem).output, session.expected(problem).output
    expect_close(output, expected, because=f"the oracle's value for {case.values} inputs")


# Of float16, whose largest number is 65504: a value, and a product with the score that it makes.
LARGE_VALUE, LARGE_SCORE = 5e4, 6e4


@property_of(
    "NUM-6",
    Domain(masks=("none", "padding"), values=("normal",), causal=BOTH, dtypes=("float16",)),
    needs=UNCHANGED_HEADS,
    requires="HED-1",
    must_reject=("clamped", "lopsided"),
    max_cases=12,
    number=2,
)
def numbers_at_the_end_of_the_range_are_not_clamped(session: Session, case: Case) -> None:
    """In float16 scores of more than 1e4, and values and outputs of 5e4, are as they are."""
    length = session.claims.sizes.length_multiple * 16
    case = with_width(replace(case, head_dim=4, B=2, L=length, S=length), session.claims, 4)
    problem = zeroed(passing_heads(case.problem()), "b_q", "b_k", "b_v")
    # One column of each head makes the scores, so that no sum on the way to them is larger.
    weights, head_dim = problem.weights, problem.config.head_dim
    others = torch.arange(len(weights.w_q), device=weights.w_q.device) % head_dim != 0
    problem = problem.change(w_q=weights.w_q.masked_fill(others.unsqueeze(-1), 0.0))
    exact, scale = session.expected(problem), session.claims.scale_for(head_dim)
    products, values = (exact.query.mid @ exact.key.mid.mT).abs(), exact.value.mid.abs()
    weights = problem.weights
    of_scores = LARGE_SCORE / ((1 + abs(scale)) * float(products.amax()))
    of_values = LARGE_VALUE / float(values.amax())
    for large in (
        problem.change(w_q=weights.w_q * of_scores),
        problem.change(w_v=weights.w_v * of_values),
    ):
        output, expected = session(large).output, session.expected(large).output
        expect_close(output, expected, because="the oracle's value, and nothing overflows")
