"""MSK-8 and MSK-9: rows with no allowed key."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, DENSE, MODERATE, PATHS, WITH_GRADIENT, Domain
from mha.conformance.cases.masks import EMPTY
from mha.conformance.harness.assertions import expect, expect_close, expect_raises, need
from mha.conformance.harness.recording import Observed
from mha.conformance.harness.session import Trial
from mha.conformance.properties.dropout import dropping
from mha.conformance.properties.long_rows import FEW_QUERIES
from mha.conformance.properties.registry import checks
from mha.conformance.properties.shared import expect_finite, expect_gradients
from mha.spec import Problem
from mha.spec.bounds import Ball
from mha.spec.claims import Alignment


@checks(
    "MSK-8",
    Domain(masks=EMPTY, causal=BOTH, paths=("eval",), need_weights=(False,)),
    after="HED-1",
    rejects=("unmasked", "noise"),
)
def empty_rows_follow_the_declared_policy(attention: Trial, case: Case) -> None:
    problem = case.problem()
    policy, answer = attention.claims.empty_row, attention.answer(problem)
    for path in PATHS:
        for need_weights in (False, True) if attention.claims.returns_weights else (False,):
            call = partial(attention, problem, path=path, need_weights=need_weights)
            if policy == "error":
                expect_raises(call, because="a row has no allowed key, and the declared policy is 'error'")
                continue
            seen = call()
            told = f"the policy {policy!r} for a row with no allowed key, on the path {path!r} "
            told += "with weights" if need_weights else "without weights"
            rows = answer.empty.any(1).unsqueeze(-1)
            _expect_rows(rows, seen.output, answer.output, told)
            if seen.weights is not None:
                _expect_rows(answer.empty.unsqueeze(-1), seen.weights, answer.weights, told)


@checks(
    "MSK-8",
    replace(FEW_QUERIES, masks=("empty_rows", "empty_item", "empty_bias"), paths=("eval",), need_weights=(False,)),
    after="HED-1",
    rejects=("unmasked", "noise"),
    limit=3,
    number=2,
)
def empty_rows_of_many_keys_follow_the_declared_policy(attention: Trial, case: Case) -> None:
    empty_rows_follow_the_declared_policy(attention, replace(case, L=2))


@checks(
    "MSK-8",
    Domain(masks=EMPTY, causal=BOTH, regimes=MODERATE, layouts=DENSE, paths=("train", "train_no_grad")),
    needs="dropout",
    after="HED-1",
    limit=24,
    number=3,
)
def dropout_leaves_empty_rows_as_they_are(attention: Trial, case: Case) -> None:
    need(attention.claims.empty_row in ("zeros", "nan"), f"the declared policy is {attention.claims.empty_row!r}")
    need(attention.claims.dropout != "output", "the output is dropped, and not the weights")
    problem = case.problem()
    answer, seen = attention.answer(problem), attention(dropping(problem, 0.5), seed=case.seed).output
    rows, all_empty = answer.empty.any(1).unsqueeze(-1), answer.empty.all(1).unsqueeze(-1)
    told = f"the policy {attention.claims.empty_row!r} for a row with no allowed key, with p = 0.5"
    _expect_rows(all_empty, seen, answer.output, told)
    others = seen.tensor.masked_fill(rows, 0.0) if attention.claims.empty_row == "nan" else seen.tensor
    expect_finite(attention.aside(others, seen.code), "with p = 0.5, beside rows with no allowed key")


@checks(
    "MSK-8",
    Domain(masks=("empty_rows",), inputs=("cross", "self"), max_length=3),
    level="SHOULD",
    limit=2,
    rejects=(),
    number=4,
)
def empty_rows_give_zeros(attention: Trial, case: Case) -> None:
    policy = attention.claims.empty_row
    expect(policy == "zeros", f"the declared policy is {policy!r}, but should be 'zeros'")


@checks("MSK-9", Domain(masks=EMPTY, causal=BOTH))
def empty_rows_leave_other_rows_alone(attention: Trial, case: Case) -> None:
    problem = case.problem()
    need(attention.claims.empty_row != "error", "the declared policy is 'error'")
    filled, full = _filled(problem, attention.claims.causal)
    need(bool(full.any()), "every row is empty")
    bounds = attention.answer(filled), attention.answer(problem)
    base, seen = attention(filled), attention(problem)
    because = f"what {base.output.code} has there, with the empty rows filled"
    reach = bounds[0].output.rad + bounds[1].output.rad
    _expect_rows(full.unsqueeze(-1), seen.output, Ball(base.output.tensor.double(), reach), because)
    if seen.weights is not None and base.weights is not None:
        reach = bounds[0].weights.rad + bounds[1].weights.rad
        _expect_rows(full[:, None, :, None], seen.weights, Ball(base.weights.tensor.double(), reach), because)


@checks(
    "MSK-9",
    Domain(masks=EMPTY, causal=BOTH, layouts=DENSE, paths=WITH_GRADIENT, regimes=MODERATE),
    needs="gradients",
    after="HED-1",
    rejects=("wild", "unmasked"),
    number=2,
)
def empty_rows_leave_other_gradients_alone(attention: Trial, case: Case) -> None:
    problem = case.problem()
    need(attention.claims.empty_row != "error", "the declared policy is 'error'")
    right, seen = attention.answer(problem).output, attention(problem).output.tensor
    if attention.claims.empty_row == "zeros" and bool(((seen - right.mid).abs() <= right.rad).all()):
        expect_gradients(attention, problem, None, "to which a row without keys adds nothing")
        return
    _, full = _filled(problem, attention.claims.causal)
    need(bool(full.any()), "every row is empty")
    expect_gradients(attention, problem, full, "with only rows differentiated that have keys")


def _filled(problem: Problem, alignment: Alignment | None) -> tuple[Problem, Tensor]:
    """Return the problem with its empty rows allowed everything, and the boolean (B, L) of the rows that had keys."""
    mask = problem.mask
    assert mask is not None
    empty = ~problem.allowed(alignment).any(-1, keepdim=True)
    if mask.shape[1] == 1:
        empty = empty[:, :1]
    filled = mask | empty if mask.dtype == torch.bool else torch.where(empty, 0.0, mask)
    return problem.change(mask=filled), (~empty).all(1)[..., 0]


def _expect_rows(rows: Tensor, got: Observed, expected: Ball, because: str) -> None:
    """Expect a result in some rows, whatever the others hold."""
    value = torch.where(rows, expected.mid, got.tensor.double())
    expect_close(got, Ball(value, expected.rad), because=because)
