"""SHP: shapes, dtype, device and memory layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import ALL_LAYOUTS, BOTH, DENSE, Domain
from mha.conformance.cases.mask_kinds import BOOLEAN, FEW, FLOAT
from mha.conformance.harness.assertions import (
    assume,
    expect_agree,
    expect_close,
    expect_each_raises,
    expect_shape,
)
from mha.conformance.harness.errors import CallRaised
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.shared_assertions import weights_of, with_other
from mha.spec import Problem, oracle
from mha.spec.problem import INPUTS

NOT_CONTIGUOUS = tuple(layout for layout in ALL_LAYOUTS if layout != "contiguous")
# Shapes do not depend on the numbers.
NORMAL = ("normal",)
SOME_MASKS = ("none", "all", *FEW, "bias")

Shape = tuple[int, int, int]
# Shapes of inputs that do not fit together, by the reason and by the name of the input.
Disagreeing = dict[str, dict[str, Shape]]


@property_of("SHP-1", Domain(masks=SOME_MASKS, values=NORMAL), must_reject=())
def output_has_the_shape_of_the_query(session: Session, case: Case) -> None:
    """The output is (B, L, D) for a query (B, L, D), and a key and value (B, S, D)."""
    expect_shape(session(case.problem()).output, (case.B, case.L, case.config.d_model))


@property_of(
    "SHP-2",
    Domain(masks=SOME_MASKS, values=NORMAL, need_weights=(True,)),
    needs="returns_weights",
    must_reject=(),
)
def weights_are_per_head(session: Session, case: Case) -> None:
    """The weights have shape (B, H, L, S)."""
    expect_shape(weights_of(session(case.problem())), (case.B, case.n_heads, case.L, case.S))


@property_of(
    "SHP-3",
    Domain(masks=("none", "all", *BOOLEAN, *FLOAT), causal=BOTH, values=NORMAL),
    must_reject=(),
)
def dtype_and_device_are_those_of_the_inputs(session: Session, case: Case) -> None:
    """The output has the dtype and device of the inputs."""
    session(case.problem())  # a session checks the dtype and device of every result


@property_of(
    "SHP-4", Domain(masks=SOME_MASKS, values=NORMAL, max_length=2, max_B=2), must_reject=()
)
def sizes_of_one_stay(session: Session, case: Case) -> None:
    """B = 1, L = 1 and S = 1 work, in every combination, and no dimension is squeezed away."""
    result = session(case.problem())
    expect_shape(result.output, (case.B, case.L, case.config.d_model))
    if result.weights is not None:
        expect_shape(result.weights, (case.B, case.n_heads, case.L, case.S))


@property_of(
    "SHP-5",
    Domain(values=NORMAL, layouts=DENSE, inputs=("cross", "self"), max_length=5),
    must_reject=("never_empty",),
)
def empty_inputs_give_empty_outputs(session: Session, case: Case) -> None:
    """B = 0 and L = 0 give an empty output; S = 0 gives zero contexts, or NaN where claimed."""
    problem = case.problem()
    no_items = problem.map_inputs(lambda x: x[:0])
    no_queries = problem.map_inputs(lambda x: x[:, :0])
    if not problem.is_self:
        no_queries = problem.change(query=problem.query[:, :0])
    for empty in (no_items, no_queries):
        expect_shape(session(empty).output, tuple(empty.query.shape))
    policy = session.claims.empty_row
    if not problem.is_self and policy in ("zeros", "nan"):
        no_keys = problem.map_inputs(lambda x: x if x is problem.query else x[:, :0])
        output = session(no_keys).output
        if policy == "nan" and bool(output.tensor.isnan().all()):
            return
        expected = oracle(no_keys, replace(session.claims, empty_row="zeros")).output
        expect_close(output, expected, because="with S = 0, a context is a sum of nothing")


DISAGREEING = Domain(values=NORMAL, layouts=DENSE, inputs=("cross",), max_length=5)


@property_of("SHP-6", DISAGREEING, must_reject=("never_refuses",))
def widths_and_lengths_that_disagree_are_refused(session: Session, case: Case) -> None:
    """A width other than D, and different S of key and value, raise."""
    _expect_refused(session, case.problem(), _disagreeing_widths_and_lengths)


@property_of(
    "SHP-6",
    DISAGREEING,
    needs="extras=length_first",
    must_reject=("never_refuses",),
    max_cases=12,
    number=2,
)
def widths_that_disagree_are_refused_with_the_length_first(session: Session, case: Case) -> None:
    """The same inputs raise in the layout (length, batch, width)."""
    _expect_refused(session, _length_first(case), _disagreeing_widths_and_lengths)


@property_of("SHP-8", DISAGREEING, must_reject=("never_refuses",))
def batches_that_disagree_are_refused(session: Session, case: Case) -> None:
    """Batch sizes that differ raise; a batch of one is not broadcast."""
    _expect_refused(session, case.problem(), _disagreeing_batches)


@property_of(
    "SHP-8",
    DISAGREEING,
    needs="extras=length_first",
    must_reject=("never_refuses",),
    max_cases=12,
    number=2,
)
def batches_that_disagree_are_refused_with_the_length_first(session: Session, case: Case) -> None:
    """The same inputs raise in the layout (length, batch, width)."""
    _expect_refused(session, _length_first(case), _disagreeing_batches)


def _length_first(case: Case) -> Problem:
    return case.problem().change(config=replace(case.config, length_first=True))


def _expect_refused(
    session: Session, problem: Problem, made: Callable[[Problem], Disagreeing]
) -> None:
    """Expect calls with inputs of these shapes to raise, each for the reason that is its key.

    problem: with its inputs batch first, also where `Config.length_first` is set. Shapes that give
    one tensor two sizes are left out.
    """
    calls = {}
    for because, shapes in made(problem).items():
        if not _fits_shared_inputs(problem, shapes):
            continue
        changed = problem.change(**_zeros(problem, shapes))
        if problem.config.length_first:
            changed = changed.map_inputs(lambda x: x.transpose(0, 1))
            because = f"{because}, with length_first=True"
        calls[because] = partial(session, changed)
    assume(bool(calls), "inputs that are one tensor cannot disagree")
    expect_each_raises(calls)


def _fits_shared_inputs(problem: Problem, shapes: Mapping[str, Shape]) -> bool:
    """Return whether inputs that are one tensor have one shape."""
    for one, other in combinations(INPUTS, 2):
        are_shared = getattr(problem, one) is getattr(problem, other)
        if are_shared and shapes.get(one) != shapes.get(other):
            return False
    return True


def _disagreeing_widths_and_lengths(problem: Problem) -> Disagreeing:
    (batch, _, queries, keys), width = problem.shape, problem.config.d_model
    shapes: Disagreeing = {
        "the width of the query is not d_model": {"query": (batch, queries, width + 1)},
        "the width of the key is not d_model": {"key": (batch, keys, width + 1)},
        "the width of the value is not d_model": {"value": (batch, keys, width + 1)},
        "the width of key and value is not d_model": {
            "key": (batch, keys, width + 1),
            "value": (batch, keys, width + 1),
        },
        "the width of the query is twice d_model": {"query": (batch, queries, 2 * width)},
        "the value is longer than the key": {"value": (batch, keys + 1, width)},
        "the key is longer than the value": {
            "key": (batch, keys + 2, width),
            "value": (batch, keys + 1, width),
        },
        "the value has length 1, but the key does not": {
            "key": (batch, keys + 1, width),
            "value": (batch, 1, width),
        },
    }
    lengths = {"query": queries, "key": keys, "value": keys}
    widths = {"narrower than": width - 1, "wider than": width + 1, "twice as wide as": 2 * width}
    for comparison, other in widths.items():
        if other and (comparison == "narrower than" or problem.query is problem.key):
            every = {name: (batch, length, other) for name, length in lengths.items()}
            shapes[f"all inputs are {comparison} d_model"] = every
    return shapes


def _zeros(problem: Problem, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Return inputs of zeros by name; those that are one tensor stay one tensor."""
    zeros: dict[int, Tensor] = {}
    for name, shape in shapes.items():
        zeros.setdefault(id(getattr(problem, name)), problem.query.new_zeros(shape))
    return {name: zeros[id(getattr(problem, name))] for name in shapes}


def _disagreeing_batches(problem: Problem) -> Disagreeing:
    (batch, _, queries, keys), width = problem.shape, problem.config.d_model
    one_query, one_key = (1, queries, width), (1, keys, width)
    more_queries, more_keys = (batch + 1, queries, width), (batch + 1, keys, width)
    twice = (2 * batch, keys, width)
    return {
        "the batch of the query is larger than that of key and value": {"query": more_queries},
        "only the query has a batch size of 1": {
            "query": one_query,
            "key": more_keys,
            "value": more_keys,
        },
        "only the key has a batch size of 1": {
            "query": more_queries,
            "key": one_key,
            "value": more_keys,
        },
        "only the value has a batch size of 1": {
            "query": more_queries,
            "key": more_keys,
            "value": one_key,
        },
        "key and value have a batch size of 1, but the query does not": {
            "query": more_queries,
            "key": one_key,
            "value": one_key,
        },
        "the batch size of key and value is twice that of the query": {
            "key": twice,
            "value": twice,
        },
    }


@property_of("SHP-7", Domain(masks=SOME_MASKS, layouts=NOT_CONTIGUOUS))
def layout_does_not_matter(session: Session, case: Case) -> None:
    """Inputs that are not contiguous give the result of their contiguous copies."""
    problem = case.problem()
    contiguous = problem.map_inputs(lambda x: x.clone(memory_format=torch.contiguous_format))
    pairs = zip(problem.distinct().values(), contiguous.distinct().values(), strict=True)
    differs = any(one.stride() != other.stride() for one, other in pairs)
    assume(differs, "inputs of one element are contiguous")
    expected = session(contiguous).output
    try:
        output = session(problem).output
    except CallRaised:
        return
    because = f"the result for contiguous copies of the inputs, which are {case.layout}"
    expect_agree(output, expected, session.bound_of(problem), because=because)


@property_of(
    "SHP-7",
    Domain(masks=SOME_MASKS, layouts=NOT_CONTIGUOUS),
    level="SHOULD",
    must_reject=(),
    number=3,
)
def every_layout_is_accepted(session: Session, case: Case) -> None:
    """Non-contiguous, transposed, expanded and sliced inputs are not refused."""
    session(case.problem())


AXES = ("the batch", "the length", "the width")


@property_of(
    "SHP-7",
    Domain(
        masks=SOME_MASKS,
        causal=BOTH,
        layouts=DENSE,
        min_heads=2,
        min_B=2,
        min_L=2,
        min_S=2,
        max_length=9,
    ),
    max_cases=6,
    number=2,
)
def one_expanded_input_beside_dense_ones(session: Session, case: Case) -> None:
    """One input expanded along any axis, beside dense ones, gives the result of its copy."""
    problem = case.problem()
    for name, x in problem.distinct().items():
        for axis, along in enumerate(AXES):
            expanded = x.narrow(axis, 0, 1).expand_as(x)
            copied = with_other(problem, x, expanded.clone(memory_format=torch.contiguous_format))
            expected = session(copied).output
            try:
                output = session(with_other(problem, x, expanded)).output
            except CallRaised:
                continue
            because = (
                f"the result for a contiguous copy of the {name}, which is expanded along {along}"
            )
            expect_agree(output, expected, session.bound_of(copied), because=because)
