"""MSK-8 and MSK-9: rows with no allowed key."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import ALL_MODES, BOTH, DENSE, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.masks import EMPTY
from mha.conformance.harness.assertions import assume, expect, expect_close, expect_raises
from mha.conformance.harness.recording import RecordedTensor
from mha.conformance.harness.session import Session
from mha.conformance.properties.domains import FEW_QUERIES
from mha.conformance.properties.problems import with_dropout
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.shared import expect_finite, expect_gradients
from mha.spec import Problem
from mha.spec.bounds import Ball
from mha.spec.claims import Alignment


@property_of(
    "MSK-8",
    Domain(masks=EMPTY, causal=BOTH, modes=("eval",), need_weights=(False,)),
    requires="HED-1",
    must_reject=("unmasked", "noise"),
)
def empty_rows_follow_the_declared_policy(session: Session, case: Case) -> None:
    problem = case.problem()
    policy, answer = session.claims.empty_row, session.expected(problem)
    for mode in ALL_MODES:
        for need_weights in (False, True) if session.claims.returns_weights else (False,):
            call = partial(session, problem, mode=mode, need_weights=need_weights)
            if policy == "error":
                expect_raises(call, because="a row has no allowed key, and the declared policy is 'error'")
                continue
            seen = call()
            told = f"the policy {policy!r} for a row with no allowed key, on the path {mode!r} "
            told += "with weights" if need_weights else "without weights"
            rows = answer.empty.any(1).unsqueeze(-1)
            _expect_rows(rows, seen.output, answer.output, told)
            if seen.weights is not None:
                _expect_rows(answer.empty.unsqueeze(-1), seen.weights, answer.weights, told)


@property_of(
    "MSK-8",
    replace(FEW_QUERIES, masks=("empty_rows", "empty_item", "empty_bias"), modes=("eval",), need_weights=(False,)),
    requires="HED-1",
    must_reject=("unmasked", "noise"),
    max_cases=3,
    number=2,
)
def empty_rows_of_many_keys_follow_the_declared_policy(session: Session, case: Case) -> None:
    empty_rows_follow_the_declared_policy(session, replace(case, L=2))


@property_of(
    "MSK-8",
    Domain(masks=EMPTY, causal=BOTH, values=MODERATE, layouts=DENSE, modes=("train", "train_no_grad")),
    needs=("dropout=True", "empty_row=zeros|nan"),
    requires="HED-1",
    max_cases=24,
    number=3,
)
def dropout_leaves_empty_rows_as_they_are(session: Session, case: Case) -> None:
    problem = case.problem()
    answer, seen = session.expected(problem), session(with_dropout(problem, 0.5), seed=case.seed).output
    rows, all_empty = answer.empty.any(1).unsqueeze(-1), answer.empty.all(1).unsqueeze(-1)
    told = f"the policy {session.claims.empty_row!r} for a row with no allowed key, with p = 0.5"
    _expect_rows(all_empty, seen, answer.output, told)
    others = seen.tensor.masked_fill(rows, 0.0) if session.claims.empty_row == "nan" else seen.tensor
    expect_finite(session.unscripted(others, seen.code), "with p = 0.5, beside rows with no allowed key")


@property_of(
    "MSK-8",
    Domain(masks=("empty_rows",), inputs=("cross", "self"), max_length=3),
    level="SHOULD",
    max_cases=2,
    must_reject=(),
    number=4,
)
def empty_rows_give_zeros(session: Session, case: Case) -> None:
    policy = session.claims.empty_row
    expect(policy == "zeros", f"the declared policy is {policy!r}, but should be 'zeros'")


@property_of("MSK-9", Domain(masks=EMPTY, causal=BOTH), needs="empty_row=zeros|nan|uniform")
def empty_rows_leave_other_rows_alone(session: Session, case: Case) -> None:
    problem = case.problem()
    filled, full = _filled(problem, session.claims.causal)
    assume(bool(full.any()), "every row is empty")
    bounds = session.expected(filled), session.expected(problem)
    base, seen = session(filled), session(problem)
    because = f"what {base.output.code} has there, with the empty rows filled"
    reach = bounds[0].output.rad + bounds[1].output.rad
    _expect_rows(full.unsqueeze(-1), seen.output, Ball(base.output.tensor.double(), reach), because)
    if seen.weights is not None and base.weights is not None:
        reach = bounds[0].weights.rad + bounds[1].weights.rad
        _expect_rows(full[:, None, :, None], seen.weights, Ball(base.weights.tensor.double(), reach), because)


@property_of(
    "MSK-9",
    Domain(masks=EMPTY, causal=BOTH, layouts=DENSE, modes=WITH_GRADIENT, values=MODERATE),
    needs=("gradients", "empty_row=zeros|nan|uniform"),
    requires="HED-1",
    must_reject=("nan_gradients", "unmasked"),
    number=2,
)
def empty_rows_leave_other_gradients_alone(session: Session, case: Case) -> None:
    problem = case.problem()
    right, seen = session.expected(problem).output, session(problem).output.tensor
    if session.claims.empty_row == "zeros" and bool(((seen - right.mid).abs() <= right.rad).all()):
        expect_gradients(session, problem, None, "to which a row without keys adds nothing")
        return
    _, full = _filled(problem, session.claims.causal)
    assume(bool(full.any()), "every row is empty")
    expect_gradients(session, problem, full, "with only rows differentiated that have keys")


def _filled(problem: Problem, alignment: Alignment | None) -> tuple[Problem, Tensor]:
    """Return the problem with its empty rows allowed everything, and the boolean (B, L) of the rows that had keys."""
    mask = problem.mask
    assert mask is not None
    empty = ~problem.allowed(alignment).any(-1, keepdim=True)
    if mask.shape[1] == 1:
        empty = empty[:, :1]
    filled = mask | empty if mask.dtype == torch.bool else torch.where(empty, 0.0, mask)
    return problem.change(mask=filled), (~empty).all(1)[..., 0]


def _expect_rows(rows: Tensor, got: RecordedTensor, expected: Ball, because: str) -> None:
    """Expect a result in some rows, whatever the others hold."""
    value = torch.where(rows, expected.mid, got.tensor.double())
    expect_close(got, Ball(value, expected.rad), because=because)
