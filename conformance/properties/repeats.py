"""DET: bits that do not change from call to call, and with the rest of a batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, DENSE, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.harness.assertions import expect_equal
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.shared_assertions import assume_answered
from mha.spec import Problem

# Long enough for several tiles of keys, whose sums may be in any order.
LONG = Domain(
    causal=BOTH,
    values=MODERATE,
    need_weights=(False,),
    scale="wide",
    sizes={
        "n_heads": (3, 8),
        "head_dim": (17, 64),
        "B": (2, 5),
        "L": (7, 33, 1),
        "S": (197, 33),
    },
)
# Numbers of items on both sides of 32, where kernels change how they split.
BATCHES = (1, 31, 33)


@property_of(
    "DET-1", LONG, needs="repeats", requires="HED-1", must_reject=("own_bits",), max_cases=10
)
def a_second_call_has_the_same_bits(session: Session, case: Case) -> None:
    """Four calls with the same inputs give the same bits."""
    problem = case.problem()
    assume_answered(session, problem)
    first = session(problem).output
    for _ in range(3):
        expect_equal(session(problem).output, first, because="the same call before")


@property_of(
    "DET-1",
    replace(LONG, modes=WITH_GRADIENT),
    needs=("repeats=both", "gradients"),
    requires="HED-1",
    must_reject=("random_gradient_scale",),
    max_cases=6,
    number=2,
)
def a_second_backward_pass_has_the_same_bits(session: Session, case: Case) -> None:
    """The gradients of two calls with the same inputs have the same bits."""
    problem = case.problem()
    assume_answered(session, problem)
    upstream = session.upstream(problem)
    first, second = (session.gradients(problem, upstream) for _ in range(2))
    for name, gradient in second.items():
        expect_equal(gradient, first[name], because="the gradient of the same call before")


def _invariant(problem: Problem) -> Problem:
    return problem.change(batch_invariant=True)


def _of_items(problem: Problem, places: Tensor) -> Problem:
    """Return the problem with items at these places of the batch."""
    return _invariant(problem.map_inputs(lambda x: x[places]))


@property_of(
    "DET-2",
    replace(LONG, layouts=DENSE),
    needs="batch_invariant",
    requires="HED-1",
    must_reject=("lopsided",),
    max_cases=10,
)
def an_item_does_not_depend_on_place_and_neighbours(session: Session, case: Case) -> None:
    """The bits of an item are those of it alone, at another place, and beside other items."""
    problem = case.problem()
    assume_answered(session, problem)
    whole = session(_invariant(problem)).output
    turned = torch.arange(case.B).roll(1)
    others = problem.map_inputs(lambda x: torch.cat([x[:1], 3 * x[1:] + 1]))
    alone = session(_of_items(problem, torch.tensor([0]))).output
    expect_equal(alone[0], whole[0], because="the bits of the item in its batch")
    moved = session(_of_items(problem, turned)).output
    expect_equal(moved[1], whole[0], because="the bits of the item at its first place")
    beside = session(_invariant(others)).output
    expect_equal(beside[0], whole[0], because="the bits of the item beside other items")


@property_of(
    "DET-2",
    replace(LONG, layouts=DENSE, inputs=("cross", "self")),
    needs="batch_invariant",
    requires="HED-1",
    must_reject=("lopsided",),
    max_cases=6,
    number=2,
)
def an_item_does_not_depend_on_the_number_of_items(session: Session, case: Case) -> None:
    """The bits of an item are the same in batches of 1, 31 and 33 items."""
    problem = case.problem()
    assume_answered(session, problem)
    first = None
    for count in BATCHES:
        places = torch.arange(count) % case.B
        item = session(_of_items(problem, places)).output[0]
        if first is None:
            first = item
            continue
        expect_equal(item, first, because="the bits of the item alone")
