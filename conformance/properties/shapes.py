"""SHP: shapes, dtype and device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import ALL_LAYOUTS, BOTH, DENSE, Domain
from mha.conformance.cases.masks import BOOLEAN, FEW, FLOAT
from mha.conformance.harness.assertions import expect_agree, expect_close, expect_raises, expect_shape
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.shared import weights_of
from mha.spec import Problem

NOT_DENSE = tuple(layout for layout in ALL_LAYOUTS if layout != "contiguous")
# Shapes do not depend on numbers.
PLAIN = ("normal",)
SOME_MASKS = ("none", "all", *FEW, "bias")
ANY_MASK = ("none", "all", *BOOLEAN, *FLOAT)


@property_of("SHP-1", Domain(masks=SOME_MASKS, values=PLAIN), must_reject=())
def output_has_the_shape_of_the_query(session: Session, case: Case) -> None:
    expect_shape(session(case.problem()).output, (case.B, case.L, case.config.d_model))


@property_of(
    "SHP-2", Domain(masks=SOME_MASKS, values=PLAIN, need_weights=(True,)), needs="returns_weights", must_reject=()
)
def weights_are_per_head(session: Session, case: Case) -> None:
    expect_shape(weights_of(session(case.problem())), (case.B, case.n_heads, case.L, case.S))


@property_of("SHP-3", Domain(masks=ANY_MASK, causal=BOTH, values=PLAIN), must_reject=())
def dtype_and_device_are_those_of_the_inputs(session: Session, case: Case) -> None:
    session(case.problem())  # a trial checks the dtype and the device of whatever a call returns


@property_of("SHP-4", Domain(masks=SOME_MASKS, values=PLAIN, max_length=2, max_B=2), must_reject=())
def sizes_of_one_stay(session: Session, case: Case) -> None:
    seen = session(case.problem())
    expect_shape(seen.output, (case.B, case.L, case.config.d_model))
    if seen.weights is not None:
        expect_shape(seen.weights, (case.B, case.n_heads, case.L, case.S))


@property_of(
    "SHP-5", Domain(values=PLAIN, layouts=DENSE, inputs=("cross", "self"), max_length=5), must_reject=("noise",)
)
def empty_inputs_give_empty_outputs(session: Session, case: Case) -> None:
    problem = case.problem()
    no_items = problem.map_inputs(lambda x: x[:0])
    no_queries = problem.map_inputs(lambda x: x[:, :0])
    if problem.query is not problem.key:
        no_queries = problem.change(query=problem.query[:, :0])
    for empty in (no_items, no_queries):
        expect_shape(session(empty).output, tuple(empty.query.shape))
    policy = session.claims.empty_row
    if problem.query is not problem.key and policy in ("zeros", "nan"):
        no_keys = problem.map_inputs(lambda x: x if x is problem.query else x[:, :0])
        seen, answer = session(no_keys).output, session.expected(no_keys).output
        expect_close(seen, answer, because=f"the policy {policy!r} for rows without a key, here with S = 0")


DISAGREEING = Domain(values=PLAIN, layouts=DENSE, inputs=("cross",), max_length=5)


@property_of("SHP-6", DISAGREEING, must_reject=("never_refuses",))
def shapes_that_disagree_are_refused(session: Session, case: Case) -> None:
    problem = case.problem()
    for because, change in _disagreeing(problem).items():
        expect_raises(partial(session, problem.change(**change)), because=because)


@property_of("SHP-6", DISAGREEING, needs="extras=length_first", must_reject=("never_refuses",), max_cases=12, number=2)
def shapes_that_disagree_are_refused_with_the_length_first(session: Session, case: Case) -> None:
    problem = case.problem().change(config=replace(case.config, length_first=True))
    for because, change in _disagreeing(problem).items():
        wrong = problem.change(**change).map_inputs(lambda x: x.transpose(0, 1))
        expect_raises(partial(session, wrong), because=f"{because}, with the length first")


def _disagreeing(problem: Problem) -> dict[str, dict[str, Tensor]]:
    """Return changes of inputs after which their sizes, batch first, do not fit, and why."""
    (batch, _, queries, keys), width, zeros = problem.shape, problem.config.d_model, problem.query.new_zeros
    more = batch + 1
    wrong = {
        "the query's width is not d_model": {"query": zeros(batch, queries, width + 1)},
        "the key's width is not d_model": {"key": zeros(batch, keys, width + 1)},
        "the value's width is not d_model": {"value": zeros(batch, keys, width + 1)},
        "the query's width is a multiple of d_model": {"query": zeros(batch, queries, 2 * width)},
        "the value is longer than the key": {"value": zeros(batch, keys + 1, width)},
        "the key is longer than the value": {
            "key": zeros(batch, keys + 2, width),
            "value": zeros(batch, keys + 1, width),
        },
        "the value has length 1, the key has not": {
            "key": zeros(batch, keys + 1, width),
            "value": zeros(batch, 1, width),
        },
        "the query's batch is larger": {"query": zeros(more, queries, width)},
        "the query's batch is 1, the others' is not": {
            "query": zeros(1, queries, width),
            "key": zeros(more, keys, width),
            "value": zeros(more, keys, width),
        },
        "the key's batch is 1, the others' is not": {
            "query": zeros(more, queries, width),
            "key": zeros(1, keys, width),
            "value": zeros(more, keys, width),
        },
        "the value's batch is 1, the others' is not": {
            "query": zeros(more, queries, width),
            "key": zeros(more, keys, width),
            "value": zeros(1, keys, width),
        },
        "key and value have a batch of 1, the query has not": {
            "query": zeros(more, queries, width),
            "key": zeros(1, keys, width),
            "value": zeros(1, keys, width),
        },
        "the batch of key and value is twice the query's": {
            "key": zeros(2 * batch, keys, width),
            "value": zeros(2 * batch, keys, width),
        },
    }
    if width > 1:
        wrong["all inputs are narrower than d_model"] = {
            name: zeros(batch, length, width - 1)
            for name, length in (("query", queries), ("key", keys), ("value", keys))
        }
    return wrong


@property_of("SHP-7", Domain(masks=SOME_MASKS, layouts=NOT_DENSE))
def layout_does_not_matter(session: Session, case: Case) -> None:
    problem = case.problem()
    dense = problem.map_inputs(lambda x: x.clone(memory_format=torch.contiguous_format))
    bound = session.expected(problem).output
    seen, expected = session(problem).output, session(dense).output
    expect_agree(seen, expected, bounds=(bound, bound), because=f"what contiguous copies of {case.layout} inputs give")
