"""LEN: how many keys, and queries, each item of a dense batch has."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import (
    BOTH,
    BOUNDED,
    DENSE,
    MODERATE,
    WIDE_RANGE,
    WITH_GRADIENT,
    Domain,
)
from mha.conformance.cases.mask_kinds import COMMON
from mha.conformance.harness.assertions import assume, expect_close
from mha.conformance.harness.recording import RecordedOutput
from mha.conformance.harness.session import Session
from mha.conformance.properties.lse import assume_lse_determined
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.domains import NEEDS_OPTIONS, SEVERAL_OPTIONS
from mha.conformance.properties.support.shared_assertions import (
    assume_answered,
    assume_taken_together,
    expect_gradients,
    result_together,
)
from mha.spec import Problem
from mha.spec.bounds import Ball

OF_ITEMS = Domain(
    masks=COMMON,
    causal=BOTH,
    inputs=("cross",),
    values=MODERATE,
    need_weights=(False,),
    lengths=("keys", "both"),
    min_B=2,
)
BESIDE_OPTIONS = replace(
    SEVERAL_OPTIONS,
    inputs=("cross",),
    windows=(None, (1, 0), (2, 1)),
    need_weights=(False,),
    lengths=("keys", "both"),
    min_B=2,
)
ALONE = "the oracle's value, of each item with its own lengths"


def assume_means_known(session: Session, problem: Problem) -> None:
    """Discard a case with an empty row that gets a mean, of an item with fewer keys than others.

    The mean may be of all values, or of the item's own: none, if it has no key.
    """
    if session.claims.empty_row != "uniform":
        return
    keys = problem.shape[3]
    lengths = problem.options.key_lengths or ()
    is_short = torch.tensor([length < keys for length in lengths], dtype=torch.bool)
    empty = problem.empty_rows(session.claims.alignment).cpu().any(1) & own_queries(problem)
    reason = "a row is empty, and its mean may be of the item's own values, or of all"
    assume(not bool(empty[is_short].any()), reason)


def own_queries(problem: Problem) -> Tensor:
    """Return which queries are of an item, boolean (B, L)."""
    batch, _, queries, _ = problem.shape
    own = torch.ones(batch, queries, dtype=torch.bool)
    for item, length in enumerate(problem.options.query_lengths or ()):
        own[item, length:] = False
    return own


def expect_own_rows(session: Session, problem: Problem, result: RecordedOutput) -> None:
    """Expect the oracle's output in the rows of an item's own queries, and zeros in others."""
    expect_close(result.output, _expected(session, problem), because=ALONE)


def _expected(session: Session, problem: Problem) -> Ball:
    """Return the oracle's output, with contexts of zeros in rows after the queries of an item."""
    expected = session.expected(problem).output
    zeros = session.expected(problem, replace(session.claims, empty_row="zeros")).output
    others = ~own_queries(problem).unsqueeze(-1).to(expected.mid.device)
    return Ball(zeros.mid.where(others, expected.mid), zeros.rad.where(others, expected.rad))


@property_of(
    "LEN-1",
    OF_ITEMS,
    needs="lengths",
    requires="HED-1",
    must_reject=("ignores_lengths", "lopsided"),
)
def each_item_has_its_own_lengths(session: Session, case: Case) -> None:
    """With lengths the result is within the bound of the oracle's, which has none beyond them."""
    problem = case.problem()
    assume_answered(session, problem)
    assume_means_known(session, problem)
    expect_own_rows(session, problem, session(problem))


@property_of(
    "LEN-1",
    replace(OF_ITEMS, layouts=DENSE, dtypes=WIDE_RANGE),
    needs="lengths",
    requires="LEN-1",
    must_reject=("ignores_lengths",),
    max_cases=30,
    number=2,
)
def what_is_after_a_length_reaches_nothing(session: Session, case: Case) -> None:
    """NaN, or the largest number, in keys and values after the lengths changes nothing."""
    problem = case.problem()
    assume_answered(session, problem)
    assume_means_known(session, problem)
    garbage = math.nan if case.seed % 3 else torch.finfo(problem.query.dtype).max
    result = session(_spoilt(problem, garbage))
    expect_own_rows(session, problem, result)


@property_of(
    "LEN-1",
    replace(BESIDE_OPTIONS, layouts=DENSE, dtypes=WIDE_RANGE),
    needs=("lengths", NEEDS_OPTIONS),
    requires="LEN-1",
    must_reject=("ignores_lengths",),
    max_cases=20,
    number=7,
)
def what_is_after_a_length_reaches_nothing_beside_options(session: Session, case: Case) -> None:
    """Beside other options, NaN in keys and values after the lengths changes nothing."""
    problem = case.problem()
    assume_means_known(session, problem)
    result = result_together(session, _spoilt(problem, math.nan))
    expect_own_rows(session, problem, result)


def _spoilt(problem: Problem, garbage: float) -> Problem:
    """Return a problem with other numbers after the lengths of its items."""
    key, value = problem.key.clone(), problem.value.clone()
    for item, length in enumerate(problem.options.key_lengths or ()):
        key[item, length:] = garbage
        value[item, length:] = garbage
    return problem.change(key=key, value=value)


@property_of(
    "LEN-1",
    replace(OF_ITEMS, lengths=("both",)),
    needs="lengths=both",
    requires="LEN-1",
    must_reject=("ignores_lengths",),
    max_cases=20,
    number=3,
)
def rows_after_the_queries_are_zero(session: Session, case: Case) -> None:
    """Contexts after the queries of an item are zero, even if its other ones are not."""
    problem = case.problem()
    assume_answered(session, problem)
    own = own_queries(problem).unsqueeze(-1).to(problem.query.device)
    assume(not bool(own.all()), "every item has all queries")
    output, expected = session(problem).output, _expected(session, problem)
    of_others = Ball(expected.mid, expected.rad.masked_fill(own, math.inf))
    expect_close(output, of_others, because="a context of zeros, after the queries of the item")


@property_of(
    "LEN-1",
    replace(OF_ITEMS, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs=("lengths", "gradients"),
    requires="LEN-1",
    must_reject=("ignores_lengths", "nan_gradients"),
    max_cases=20,
    number=4,
)
def gradients_have_the_lengths(session: Session, case: Case) -> None:
    """With lengths the gradients are within the bound: none for keys after them."""
    problem = case.problem()
    assume_answered(session, problem)
    assume_means_known(session, problem)
    because = "by the oracle's formulas, of each item with its own lengths"
    expect_gradients(session, problem, own_queries(problem), because)


@property_of(
    "LEN-1",
    BESIDE_OPTIONS,
    needs="lengths",
    requires="LEN-1",
    must_reject=("ignores_lengths",),
    max_cases=30,
    number=5,
)
def lengths_go_with_other_options(session: Session, case: Case) -> None:
    """With lengths beside other options or grouped heads the result is within the bound."""
    problem = case.problem()
    assume_means_known(session, problem)
    expect_own_rows(session, problem, result_together(session, problem))


@property_of(
    "LEN-1",
    replace(OF_ITEMS, lse=(True,)),
    needs=("lengths", "lse"),
    requires="LSE-1",
    must_reject=("lse_of_all_keys",),
    min_rejection_rate=0.5,
    max_cases=20,
    number=6,
)
def the_log_sum_exp_has_the_lengths(session: Session, case: Case) -> None:
    """With lengths the log-sum-exp of an item's own queries is within the bound."""
    _expect_lse_of_own_rows(session, case.problem())


@property_of(
    "LEN-1",
    replace(BESIDE_OPTIONS, lse=(True,)),
    needs=("lengths", "lse", NEEDS_OPTIONS),
    requires="LSE-1",
    must_reject=("lse_of_all_keys",),
    min_rejection_rate=0.5,
    max_cases=20,
    number=8,
)
def the_log_sum_exp_has_the_lengths_beside_options(session: Session, case: Case) -> None:
    """Beside other options, the log-sum-exp of an item's own queries is within the bound."""
    problem = case.problem()
    assume_lse_determined(session, problem)
    assume_taken_together(session, problem)
    _expect_lse_of_own_rows(session, problem)


def _expect_lse_of_own_rows(session: Session, problem: Problem) -> None:
    """Expect the oracle's log-sum-exp in the rows of an item's own queries."""
    assume_answered(session, problem)
    result, expected = session(problem), session.expected(problem).lse
    assert result.lse is not None
    others = ~own_queries(problem).unsqueeze(1).to(expected.mid.device)
    of_own = Ball(expected.mid, expected.rad.masked_fill(others, math.inf))
    expect_close(result.lse, of_own, because="the log-sum-exp of each item's own keys")
