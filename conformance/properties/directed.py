"""NUM-7: no small defect explains the error of an output in half precision better than rounding."""

from __future__ import annotations

from dataclasses import replace

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import ALL_MODES, BOTH, DENSE, HALF, INPUTS, Domain
from mha.conformance.cases.mask_kinds import FEW
from mha.conformance.cases.transforms import item
from mha.conformance.harness.assertions import assume
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.directed_errors import (
    assume_modelled,
    expect_errors_of_rounding,
    expect_rounding_alone,
)

# Values that spread over many units in the last place, and so many rows and heads that a defect of
# 1% outweighs rounding; see `mha.spec.directed` for the model.
MANY_ROWS = Domain(
    dtypes=HALF,
    scale="wide",
    masks=("none", *FEW, "bias"),
    causal=BOTH,
    values=("normal",),
    layouts=DENSE,
    inputs=INPUTS,
    sizes={
        "n_heads": (4, 8),
        "head_dim": (32, 16, 64, 128, 20),
        "B": (4, 2),
        "L": (33, 65),
        "S": (33, 65),
    },
)
# Those of cases whose sizes the property itself gives them.
PLAIN_ROWS = replace(MANY_ROWS, masks=("none",), causal=(False,), inputs=("cross",))
# As many rows, in calls that have few queries, keys or heads: those of a decoding step, or of a
# kernel of their own.
FEW_IN_EACH_CALL = replace(
    MANY_ROWS,
    min_S=8,
    sizes={
        "n_heads": (4, 1, 2),
        "head_dim": (32, 16, 64),
        "B": (128,),
        "L": (1, 8, 2),
        "S": (33, 8),
    },
)
# The items of a batch in which a scale 0.4% off shows in bfloat16: the more rows, the less of it
# rounding explains.
MANY_ITEMS = 32
# The lengths of a case with many keys: beyond a block of 512, and of 1024 with one query more than
# a tile of 64.
FEW_ROWS, MANY_KEYS = 40, 600
MORE_ROWS, MORE_KEYS = 65, 1100
# As many as sums that are kept in half precision from tile to tile take before that shows; fewer in
# self-attention, which has as many queries.
LONG_ROWS, LONG_KEYS, LONG_SELF = 33, 4096, 1024
# Items with two keys each, whose row sums are near 1, so that what is added to them shows from 0.1%
# on in bfloat16.
ITEMS_OF_TWO_KEYS = 1024


@property_of(
    "NUM-7",
    MANY_ROWS,
    requires="HED-1",
    must_reject=("one_percent", "lopsided"),
    min_rejection_rate=0.5,
    within_bounds=True,
    max_cases=10,
)
def errors_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the error of the output better than rounding."""
    expect_rounding_alone(session, case)


@property_of(
    "NUM-7", PLAIN_ROWS, requires="HED-1", must_reject=("lopsided",), max_cases=2, number=2
)
def errors_for_many_keys_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the error better than rounding, for 600 keys."""
    expect_rounding_alone(session, with_many_keys(case, FEW_ROWS, MANY_KEYS))


@property_of(
    "NUM-7",
    replace(MANY_ROWS, modes=("eval",), need_weights=(False,)),
    requires="HED-1",
    must_reject=("lopsided", "one_percent"),
    within_bounds=True,
    max_cases=1,
    number=3,
)
def errors_in_a_large_batch_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the error better than rounding, for 32 items."""
    case = replace(case, B=MANY_ITEMS, n_heads=8, head_dim=16, L=33, S=33)
    problem = case.problem()
    for mode in ALL_MODES:
        expect_rounding_alone(session, case, problem, mode)


@property_of(
    "NUM-7", FEW_IN_EACH_CALL, requires="HED-1", must_reject=("lopsided",), max_cases=3, number=4
)
def errors_for_few_queries_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the errors of few queries better than rounding."""
    expect_rounding_alone(session, case)


@property_of(
    "NUM-7", FEW_IN_EACH_CALL, requires="HED-1", must_reject=("lopsided",), max_cases=2, number=5
)
def errors_of_many_small_calls_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the errors of small calls better than rounding."""
    assume_modelled(session, case)
    problem = case.problem()
    outputs = [session(item(problem, index)).output.tensor for index in range(case.B)]
    output = session.unscripted(torch.cat(outputs), "the output of single items")
    expect_errors_of_rounding(session, case, problem, output)


@property_of(
    "NUM-7", PLAIN_ROWS, requires="HED-1", must_reject=("lopsided",), max_cases=1, number=7
)
def errors_for_more_than_1024_keys_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the error better than rounding, for 1100 keys."""
    many = with_many_keys(case, MORE_ROWS, MORE_KEYS)
    expect_rounding_alone(session, replace(many, n_heads=min(many.n_heads, 3), head_dim=64))


@property_of(
    "NUM-7", PLAIN_ROWS, requires="HED-1", must_reject=("lopsided",), max_cases=1, number=9
)
def errors_for_4096_keys_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the error better than rounding, for 4096 keys."""
    assume(case.inputs == "cross", "in self-attention there would be as many queries")
    many = with_long_rows(case)
    expect_rounding_alone(session, replace(many, n_heads=min(many.n_heads, 3), head_dim=64))


@property_of(
    "NUM-7", PLAIN_ROWS, requires="HED-1", must_reject=("lopsided",), max_cases=1, number=8
)
def errors_for_two_keys_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the error better than rounding, for two keys."""
    queries = 2 if case.causal or case.inputs != "cross" else 8
    expect_rounding_alone(
        session, replace(case, B=ITEMS_OF_TWO_KEYS, n_heads=4, head_dim=16, L=queries, S=2)
    )


def with_long_rows(case: Case) -> Case:
    """Return a case with as many keys as sums in half precision show in."""
    return with_many_keys(case, LONG_ROWS, LONG_KEYS if case.inputs == "cross" else LONG_SELF)


def with_many_keys(case: Case, queries: int, keys: int) -> Case:
    """Return a case with so many keys; where inputs are shared, as many queries and one head."""
    if case.inputs == "cross":
        return replace(case, B=1, n_heads=4, head_dim=16, L=queries, S=keys)
    return replace(case, B=1, n_heads=1, head_dim=64, L=keys, S=keys)
