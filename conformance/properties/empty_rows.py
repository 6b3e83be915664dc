"""MSK-8 and MSK-9: rows with no allowed key."""

from __future__ import annotations

from functools import partial

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import MODERATE, PATHS, WITH_GRADIENT, Domain
from mha.conformance.cases.masks import EMPTY
from mha.conformance.expect import expect, expect_agree, expect_close, expect_raises
from mha.conformance.registry import checks
from mha.conformance.trial import Trial
from mha.spec import Problem
from mha.spec.claims import Alignment

DENSE = ("contiguous",)
BOTH = (False, True)


@checks("MSK-8", Domain(masks=EMPTY, causal=BOTH))
def empty_rows_follow_the_declared_policy(attention: Trial, case: Case) -> None:
    problem = case.problem()
    policy = attention.claims.empty_row
    for path in PATHS:
        for need_weights in (False, True) if attention.claims.returns_weights else (False,):
            call = partial(attention, problem, path=path, need_weights=need_weights)
            if policy == "error":
                expect_raises(call, because="a row has no allowed key, and the declared policy is 'error'")
                continue
            answer, seen = attention.answer(problem), call()
            for item, row in answer.empty.any(1).nonzero().tolist():
                told = f"query {row} of item {item} has no allowed key, the declared policy is {policy!r}, "
                told += f"and this call is {path} {'with' if need_weights else 'without'} weights"
                expect_close(seen.output[item, row], answer.output[item, row], because=told)
                if seen.weights is not None:
                    expect_close(seen.weights[item, :, row], answer.weights[item, :, row], because=told)


@checks("MSK-9", Domain(masks=EMPTY, causal=BOTH))
def empty_rows_leave_other_rows_alone(attention: Trial, case: Case) -> None:
    problem = case.problem()
    if attention.claims.empty_row == "error":
        return
    filled, rows = _filled(problem, attention.claims.causal)
    bounds = attention.answer(filled), attention.answer(problem)
    base, seen = attention(filled), attention(problem)
    because = "only other rows were left without a key"
    for item, row in rows:
        reach = bounds[0].output[item, row], bounds[1].output[item, row]
        expect_agree(seen.output[item, row], base.output[item, row], bounds=reach, because=because)
        if seen.weights is not None and base.weights is not None:
            reach = bounds[0].weights[item, :, row], bounds[1].weights[item, :, row]
            expect_agree(seen.weights[item, :, row], base.weights[item, :, row], bounds=reach, because=because)


@checks(
    "MSK-9", Domain(masks=EMPTY, causal=BOTH, layouts=DENSE, paths=WITH_GRADIENT, regimes=MODERATE), needs="gradients"
)
def empty_rows_leave_other_gradients_alone(attention: Trial, case: Case) -> None:
    problem = case.problem()
    if attention.claims.empty_row == "error":
        return
    _, rows = _filled(problem, attention.claims.causal)
    if not rows:
        return
    others = ([item for item, _ in rows], [row for _, row in rows])
    for gradient in attention.gradients(problem, others).values():
        wild = (~gradient.tensor.isfinite()).nonzero()
        if len(wild):
            at = gradient[tuple(wild[0].tolist())]
            message = f"{at.code} is {float(at.tensor)}, though the rows differentiated all have keys"
            expect(False, message, f"assert {at.code}.isfinite(), {at.code}")


def _filled(problem: Problem, alignment: Alignment | None) -> tuple[Problem, list[tuple[int, int]]]:
    """Return the problem with all its empty rows allowed everything, and the (item, row) pairs that were not empty."""
    mask = problem.mask
    assert mask is not None
    empty = ~problem.allowed(alignment).any(-1, keepdim=True)
    if mask.shape[1] == 1:
        empty = empty[:, :1]
    rows = (~empty).all(1)[..., 0].nonzero().tolist()
    filled = mask | empty if mask.dtype == torch.bool else torch.where(empty, 0.0, mask)
    return problem.change(mask=filled), [(item, row) for item, row in rows]
