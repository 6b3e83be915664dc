"""NUM-5: rows of many keys, their gradients and half precision; some rows meet the oracle."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOUNDED, HALF, MODERATE, WITH_GRADIENT
from mha.conformance.cases.transforms import select_queries
from mha.conformance.harness.assertions import assume, expect_close
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.domains import FEW_QUERIES, LONG_ROWS
from mha.conformance.properties.support.shared_assertions import (
    as_causal,
    assume_unquantised,
    expect_gradients,
    expect_no_worse_than_plain,
)
from mha.implementations.adapters.construction import MAX_LENGTH

SAMPLED_ROWS = 4


@property_of(
    "NUM-5",
    replace(LONG_ROWS, values=(*MODERATE, "large")),
    requires="HED-1",
    must_reject=("mean", "lopsided", "slightly_lopsided"),
    max_cases=16,
)
def long_rows_are_within_the_bound(session: Session, case: Case) -> None:
    """Sampled rows of many keys are within the bound of the oracle."""
    case = _sometimes_transposed(session, case)
    _expect_rows(session, case, _sampled_rows(case, rotates=session.claims.rotary is not None))


def _sampled_rows(case: Case, *, rotates: bool) -> Tensor:
    """Return the last row, some others, and those in which small errors show.

    There, rounding has little room: where keys are few, and where angles are small.
    """
    rows = torch.randperm(case.L, generator=case.generator)[:SAMPLED_ROWS].sort().values
    rows[-1] = case.L - 1
    # The single key of the first row has a weight of 1, whatever a norm after a rotation makes of
    # the scores.
    if case.causal:
        rows[0] = 0
    if rotates and case.L > 1:
        rows[1 if case.causal else 0] = min(2, case.L - 1)
    return rows


def _expect_rows(session: Session, case: Case, rows: Tensor) -> None:
    """Expect the oracle's results in some rows, by their indices."""
    assume_unquantised(session)
    problem = case.problem()
    result = session(problem)
    expected = session.expected(select_queries(problem, rows, session.claims.causal))
    because = f"the oracle's value for {case.L} queries on {case.S} keys"
    expect_close(result.output[:, rows], expected.output, because=because)
    if result.weights is not None:
        expect_close(result.weights[:, :, rows], expected.weights, because=because)


@property_of(
    "NUM-5",
    replace(
        LONG_ROWS, masks=("none",), causal=(True,), inputs=("self",), values=("normal",), max_B=1
    ),
    requires="HED-1",
    must_reject=("unmasked",),
    max_cases=1,
    number=2,
)
def long_causal_calls_are_within_the_bound(session: Session, case: Case) -> None:
    """Rows of a long causal call are within the bound, beyond a usual buffer for causal masks."""
    assume(
        not (session.claims.changes_heads and case.dtype in HALF),
        "the roundings of a norm or a rotation in half precision may hide every error here",
    )
    n_heads = min(session.claims.sizes.n_heads or {1})
    case = replace(case, n_heads=n_heads, B=1, L=MAX_LENGTH, S=MAX_LENGTH)
    _expect_rows(session, case, torch.tensor([1023, 1024, 2047, 2048]))


@property_of(
    "GRD-1",
    replace(FEW_QUERIES, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs=("gradients", "cross_attention"),
    requires="HED-1",
    must_reject=("mean", "zeros", "detached"),
    max_cases=8,
    number=8,
)
def long_rows_have_gradients(session: Session, case: Case) -> None:
    """The gradients of few queries on many keys are within the bound."""
    case = _sometimes_transposed(session, replace(case, L=min(case.L, 2)))
    expect_gradients(session, case.problem(), None, f"of {case.L} queries on {case.S} keys")


@property_of(
    "GRD-1",
    replace(
        LONG_ROWS, masks=("none", "padding"), inputs=("self",), modes=WITH_GRADIENT, dtypes=BOUNDED
    ),
    needs="gradients",
    requires="HED-1",
    must_reject=("mean", "zeros", "detached"),
    max_cases=1,
    number=9,
)
def many_queries_on_many_keys_have_gradients(session: Session, case: Case) -> None:
    """The gradients of many queries on many keys are within the bound."""
    n_heads = min(session.claims.sizes.n_heads or {1})
    case = as_causal(session.claims, replace(case, L=520, S=520, n_heads=n_heads))
    expect_gradients(session, case.problem(), None, "of 520 queries on 520 keys")


@property_of(
    "NUM-3",
    replace(FEW_QUERIES, masks=("none",), values=("normal",), dtypes=HALF, max_heads=2),
    needs="cross_attention",
    requires="HED-1",
    must_reject=("zeros", "lopsided"),
    max_cases=6,
    number=2,
)
def long_rows_in_half_precision_are_no_worse_than_the_plain_formula(
    session: Session, case: Case
) -> None:
    """In half precision long rows have at most twice the error of the plain formula."""
    expect_no_worse_than_plain(session, replace(case, L=33))


def _sometimes_transposed(session: Session, case: Case) -> Case:
    """Return the case; one time in four with as many queries as it has keys, on few keys."""
    if case.seed % 4 != 3:
        return case
    return replace(case, L=case.S, S=case.L, causal=session.claims.always_causal)
