"""SHP: shapes, dtype and device."""

from __future__ import annotations

from functools import partial

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import Domain
from mha.conformance.cases.masks import BOOLEAN
from mha.conformance.expect import expect, expect_agree, expect_raises, expect_shape
from mha.conformance.properties.changes import weights_of
from mha.conformance.registry import checks
from mha.conformance.trial import Trial

# Shapes do not depend on numbers.
PLAIN = ("normal",)
ANY_MASK = ("none", "all", *BOOLEAN)


@checks("SHP-1", Domain(masks=ANY_MASK, regimes=PLAIN))
def output_has_the_shape_of_the_query(attention: Trial, case: Case) -> None:
    expect_shape(attention(case.problem()).output, (case.B, case.L, case.config.d_model))


@checks("SHP-2", Domain(masks=ANY_MASK, regimes=PLAIN, need_weights=(True,)), needs="returns_weights")
def weights_are_per_head(attention: Trial, case: Case) -> None:
    expect_shape(weights_of(attention(case.problem())), (case.B, case.n_heads, case.L, case.S))


@checks("SHP-3", Domain(masks=ANY_MASK, regimes=PLAIN))
def dtype_and_device_are_those_of_the_inputs(attention: Trial, case: Case) -> None:
    problem = case.problem()
    seen = attention(problem)
    for part in (seen.output, seen.weights):
        if part is not None:
            for name in ("dtype", "device"):
                got, wanted = getattr(part.tensor, name), getattr(problem.query, name)
                message = f"{part.code}.{name} is {got}, but should be {wanted}, that of the inputs"
                expect(got == wanted, message, f"assert {part.code}.{name} == query_1.{name}, {part.code}.{name}")


@checks("SHP-4", Domain(masks=ANY_MASK, regimes=PLAIN, max_length=2, max_B=2))
def sizes_of_one_stay(attention: Trial, case: Case) -> None:
    seen = attention(case.problem())
    expect_shape(seen.output, (case.B, case.L, case.config.d_model))
    if seen.weights is not None:
        expect_shape(seen.weights, (case.B, case.n_heads, case.L, case.S))


@checks("SHP-6", Domain(regimes=PLAIN, layouts=("contiguous",), inputs=("cross",), max_length=5))
def shapes_that_disagree_are_refused(attention: Trial, case: Case) -> None:
    problem = case.problem()
    width, zeros = case.config.d_model, problem.query.new_zeros

    wrong = {
        "the query's width is not d_model": {"query": zeros(case.B, case.L, width + 1)},
        "the key's width is not d_model": {"key": zeros(case.B, case.S, width + 1)},
        "the value's width is not d_model": {"value": zeros(case.B, case.S, width + 1)},
        "the query's width is a multiple of d_model": {"query": zeros(case.B, case.L, 2 * width)},
        "key and value differ in length": {"value": zeros(case.B, case.S + 1, width)},
        "the value has length 1, the key has not": {
            "key": zeros(case.B, case.S + 1, width),
            "value": zeros(case.B, 1, width),
        },
        "the query's batch differs": {"query": zeros(case.B + 1, case.L, width)},
        "key and value have a batch of 1, the query has not": {
            "query": zeros(case.B + 1, case.L, width),
            "key": zeros(1, case.S, width),
            "value": zeros(1, case.S, width),
        },
        "the value's batch differs": {"value": zeros(case.B + 1, case.S, width)},
    }
    for because, change in wrong.items():
        expect_raises(partial(attention, problem.change(**change)), because=because)


@checks("SHP-7", Domain(masks=ANY_MASK, layouts=("transposed", "sliced", "strided", "expanded")))
def layout_does_not_matter(attention: Trial, case: Case) -> None:
    problem = case.problem()
    dense = {name: getattr(problem, name).clone().contiguous() for name in ("query", "key", "value")}
    if case.inputs == "self":
        dense = dict.fromkeys(dense, dense["query"])
    bound = attention.answer(problem).output
    seen, expected = attention(problem).output, attention(problem.change(**dense)).output
    expect_agree(seen, expected, bounds=(bound, bound), because=f"what contiguous copies of {case.layout} inputs give")
