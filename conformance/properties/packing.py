"""PAK: sequences that are packed one after another."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.harness.assertions import assume, expect_each_raises, expect_raises
from mha.conformance.harness.session import Session
from mha.conformance.properties.lengths import (
    BESIDE_OPTIONS,
    OF_ITEMS,
    each_item_has_its_own_lengths,
    expect_own_rows,
    lengths_go_with_other_options,
    own_queries,
    the_log_sum_exp_has_the_lengths,
)
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.shared_assertions import assume_answered, expect_gradients
from mha.spec import Packed, Problem

OF_SEQUENCES = replace(OF_ITEMS, masks=("none",), lengths=("both",))
WITH_OPTIONS = replace(BESIDE_OPTIONS, masks=("none",), lengths=("both",))
BACKWARDS = replace(OF_SEQUENCES, modes=WITH_GRADIENT, dtypes=BOUNDED)
# What may be wrong with offsets, in words.
WRONG = {
    "late": "offsets that begin at 1",
    "falling": "offsets that fall",
    "beyond": "offsets that end after the last token",
}


@property_of(
    "PAK-1",
    OF_SEQUENCES,
    needs="packed",
    requires="HED-1",
    must_reject=("ignores_lengths", "lopsided"),
)
def a_packed_sequence_is_attended_to_alone(session: Session, case: Case) -> None:
    """The rows of each sequence are within the bound of the oracle's for it alone."""
    each_item_has_its_own_lengths(session, case)


@property_of(
    "PAK-1",
    OF_SEQUENCES,
    needs="packed.gaps",
    requires="PAK-1",
    must_reject=("ignores_lengths", "lopsided"),
    max_cases=20,
    number=2,
)
def gaps_reach_nothing(session: Session, case: Case) -> None:
    """NaN between the sequences changes no row of them."""
    problem = case.problem(packing="gaps")
    assume_answered(session, problem)
    expect_own_rows(session, problem, session(problem))


@property_of(
    "PAK-1",
    BACKWARDS,
    needs=("packed", "gradients"),
    requires="PAK-1",
    must_reject=("nan_gradients",),
    max_cases=20,
    number=3,
)
def gradients_are_those_of_each_sequence(session: Session, case: Case) -> None:
    """The gradients are within the bound of the oracle's for each sequence alone."""
    _expect_gradients(session, case.problem())


def _expect_gradients(session: Session, problem: Problem) -> None:
    """Expect the oracle's gradients of a loss of the rows of sequences."""
    assume_answered(session, problem)
    because = "by the oracle's formulas, of each sequence alone"
    expect_gradients(session, problem, own_queries(problem), because)


@property_of(
    "PAK-1",
    WITH_OPTIONS,
    needs="packed",
    requires="PAK-1",
    must_reject=("ignores_lengths", "lopsided"),
    max_cases=30,
    number=4,
)
def packing_goes_with_other_options(session: Session, case: Case) -> None:
    """With other options the rows of each sequence are within the bound."""
    lengths_go_with_other_options(session, case)


@property_of(
    "PAK-1",
    replace(OF_SEQUENCES, lse=(True,)),
    needs=("packed", "lse"),
    requires="LSE-1",
    must_reject=("lse_of_all_keys",),
    min_rejection_rate=0.5,
    max_cases=20,
    number=5,
)
def the_log_sum_exp_is_that_of_each_sequence(session: Session, case: Case) -> None:
    """The log-sum-exp of each sequence is within the bound of the oracle's for it alone."""
    the_log_sum_exp_has_the_lengths(session, case)


def _with_empty_sequence(case: Case) -> Problem:
    """Return a problem in which a sequence has no queries, no keys, or neither."""
    problem = case.problem()
    options = problem.options
    keys, queries = list(options.key_lengths or ()), list(options.query_lengths or ())
    item, kind = case.seed % case.B, case.seed // case.B % 3
    if kind != 1 or case.inputs == "self":
        keys[item] = 0
    if kind != 0 or case.inputs == "self":
        queries[item] = 0
    return problem.change(key_lengths=tuple(keys), query_lengths=tuple(queries))


@property_of(
    "PAK-2",
    OF_SEQUENCES,
    needs="packed",
    requires="PAK-1",
    must_reject=("ignores_lengths", "lopsided"),
    max_cases=30,
)
def an_empty_sequence_harms_no_other(session: Session, case: Case) -> None:
    """Beside a sequence of length 0 the rows of all are within the bound."""
    problem = _with_empty_sequence(case)
    assume_answered(session, problem)
    expect_own_rows(session, problem, session(problem))


@property_of(
    "PAK-2",
    BACKWARDS,
    needs=("packed", "gradients"),
    requires="PAK-2",
    must_reject=("nan_gradients",),
    max_cases=20,
    number=2,
)
def an_empty_sequence_harms_no_gradient(session: Session, case: Case) -> None:
    """Beside a sequence of length 0 the gradients are within the bound."""
    _expect_gradients(session, _with_empty_sequence(case))


@property_of(
    "PAK-3",
    OF_SEQUENCES,
    needs="packed",
    requires="PAK-1",
    must_reject=("ignores_lengths", "lopsided"),
    max_cases=20,
)
def tokens_after_the_last_reach_nothing(session: Session, case: Case) -> None:
    """NaN after the last offset is refused, or changes no row, as it is declared."""
    problem = case.problem(packing="tail")
    assume_answered(session, problem)
    if (session.claims.packed or Packed()).tail == "refused":
        because = "tokens after the last offset are refused, as Claims.packed says"
        expect_raises(partial(session, problem), because=because)
        return
    expect_own_rows(session, problem, session(problem))


@property_of(
    "PAK-3",
    BACKWARDS,
    needs=("packed", "gradients"),
    requires="PAK-3",
    must_reject=("nan_gradients",),
    max_cases=20,
    number=2,
)
def tokens_after_the_last_reach_no_gradient(session: Session, case: Case) -> None:
    """With NaN after the last offset the gradients are within the bound."""
    is_refused = (session.claims.packed or Packed()).tail == "refused"
    assume(not is_refused, "tokens after the last offset are refused")
    _expect_gradients(session, case.problem(packing="tail"))


@property_of(
    "PAK-4",
    Domain(causal=BOTH, values=MODERATE, lengths=("both",), min_B=3, min_L=2, min_S=2),
    needs="packed",
    must_reject=("lopsided",),
    max_cases=6,
)
def offsets_that_are_none_are_refused(session: Session, case: Case) -> None:
    """Offsets that do not begin at 0, fall, or end after the tokens, raise."""
    calls = {}
    for packing, words in WRONG.items():
        calls[f"{words} are none"] = partial(session, case.problem(packing=packing))
    expect_each_raises(calls)
