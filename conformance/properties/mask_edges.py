"""MSK: rows without an allowed key (MSK-8, MSK-9), and additive masks (MSK-11)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import (
    ALL_MODES,
    BOTH,
    DENSE,
    MODERATE,
    WIDE_RANGE,
    WITH_GRADIENT,
    Domain,
)
from mha.conformance.cases.mask_kinds import BOOLEAN, EMPTY, FLOAT
from mha.conformance.cases.transforms import as_claimed, passing_heads, with_dropout
from mha.conformance.harness.assertions import (
    assume,
    expect,
    expect_agree,
    expect_close,
    expect_raises,
)
from mha.conformance.harness.errors import CallRaised
from mha.conformance.harness.recording import RecordedOutput, RecordedTensor
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.domains import EVERYDAY_SIZES
from mha.conformance.properties.support.shared_assertions import (
    assume_answered,
    expect_finite,
    expect_gradients,
)
from mha.spec import Claims, Problem, to_convention
from mha.spec.bounds import Ball

EMPTY_WITH_GRADIENT = Domain(
    masks=EMPTY, causal=BOTH, layouts=DENSE, modes=WITH_GRADIENT, values=MODERATE
)
FEW_OF_WIDE_HEADS = {
    "n_heads": (2, 3),
    "head_dim": (128, 64, 20),
    "B": (2, 1),
    "L": (7, 1),
    "S": (9, 33),
}


@property_of(
    "MSK-8",
    Domain(masks=EMPTY, causal=BOTH, modes=("eval",), need_weights=(False,)),
    requires="HED-1",
    must_reject=("first_key_if_empty",),
)
def empty_rows_follow_the_declared_policy(session: Session, case: Case) -> None:
    """A row without a key follows the declared policy in every mode, with weights or without."""
    problem = case.problem()
    policy, results = session.claims.empty_row, list[tuple[RecordedOutput, str]]()
    requests = (False, True) if session.claims.returns_weights else (False,)
    for mode, need_weights in product(ALL_MODES, requests):
        call = partial(session, problem, mode=mode, need_weights=need_weights)
        if policy == "error":
            because = "a row has no allowed key, and the declared policy is 'error'"
            expect_raises(call, because=because)
            continue
        because = (
            f"the policy {policy!r} for a row without an allowed key, in the mode {mode!r} "
            f"with need_weights={need_weights}"
        )
        results.append((call(), because))
    for result, because in results:
        expected = session.expected(problem)
        _expect_rows(expected.empty.any(1).unsqueeze(-1), result.output, expected.output, because)
        if result.weights is not None:
            _expect_rows(expected.empty.unsqueeze(-1), result.weights, expected.weights, because)


@property_of(
    "MSK-8",
    replace(EVERYDAY_SIZES, masks=EMPTY, sizes=FEW_OF_WIDE_HEADS),
    needs="empty_row=zeros|nan|uniform",
    requires="HED-1",
    must_reject=("first_key_if_empty",),
    max_cases=3,
    number=5,
)
def empty_rows_of_wide_heads_follow_the_declared_policy(session: Session, case: Case) -> None:
    """A row without a key follows the declared policy for heads of everyday widths."""
    problem = case.problem()
    output, expected = session(problem).output, session.expected(problem)
    because = (
        f"the policy {session.claims.empty_row!r} for a row without an allowed key, with d_k ="
        f" {case.head_dim}"
    )
    _expect_rows(expected.empty.any(1).unsqueeze(-1), output, expected.output, because)


@property_of("MSK-5", Domain(masks=("empty_or_full",), causal=BOTH, min_S=2), number=3)
def mask_of_one_key_is_expanded_or_refused(session: Session, case: Case) -> None:
    """A mask of shape (B, H, L, 1) equals the same mask expanded to all keys, or raises."""
    problem = case.problem()
    if case.seed % 2 and case.n_heads > 1 and session.claims.per_head_mask:
        problem = _of_whole_heads(session.claims, problem, case)
    assert problem.mask is not None
    assume(problem.mask.shape[-1] > 1, "there is one key")
    assume_answered(session, problem)
    base = session(problem)
    try:
        result = session(problem.change(mask=problem.mask[..., :1]))
    except CallRaised:
        return
    because = "the result for the same mask, here expanded to all keys"
    expect_agree(result.output, base.output, session.bound_of(problem), because=because)
    if result.weights is not None and base.weights is not None:
        expect_agree(
            result.weights, base.weights, lambda: session.expected(problem).weights, because=because
        )


def _of_whole_heads(claims: Claims, problem: Problem, case: Case) -> Problem:
    """Return the problem with a mask (1, H, 1, S) of heads that see every key, or none."""
    allowed = torch.rand(1, case.n_heads, 1, 1, generator=case.generator) < 0.5
    allowed[:, case.seed // 2 % case.n_heads] = False
    return as_claimed(claims, problem, allowed.to(case.device).repeat(1, 1, 1, case.S))


@property_of(
    "MSK-8",
    Domain(
        masks=("empty_rows", "empty_item", "empty_bias"),
        inputs=("cross",),
        values=MODERATE,
        layouts=("contiguous", "sliced"),
        modes=("eval",),
        need_weights=(False,),
        scale="long",
        max_heads=3,
        max_B=2,
    ),
    needs="cross_attention",
    requires="HED-1",
    must_reject=("first_key_if_empty",),
    max_cases=3,
    number=2,
)
def empty_rows_of_many_keys_follow_the_declared_policy(session: Session, case: Case) -> None:
    """A row of many keys, none of them allowed, follows the declared policy too."""
    empty_rows_follow_the_declared_policy(session, replace(case, L=2))


@property_of(
    "MSK-8",
    Domain(
        masks=EMPTY, causal=BOTH, values=MODERATE, layouts=DENSE, modes=("train", "train_no_grad")
    ),
    needs=("dropout=True", "empty_row=zeros|nan"),
    requires="HED-1",
    max_cases=24,
    number=3,
    must_reject=("first_key_if_empty",),
    min_rejection_rate=0.7,  # the weight of the one key may be dropped
)
def dropout_leaves_empty_rows_as_they_are(session: Session, case: Case) -> None:
    """A row without a key follows the declared policy under dropout; other rows stay finite."""
    problem, policy = case.problem(), session.claims.empty_row
    output = session(with_dropout(problem, 0.5), seed=case.seed).output
    expected = session.expected(problem)
    empty_in_a_head = expected.empty.any(1).unsqueeze(-1)
    empty_in_all = expected.empty.all(1).unsqueeze(-1)
    because = (
        f"the policy {policy!r} for a row without an allowed key, with dropout of probability 0.5"
    )
    _expect_rows(empty_in_all, output, expected.output, because)
    others = output.tensor
    if policy == "nan":
        others = others.masked_fill(empty_in_a_head, 0.0)
    because = "with dropout and rows without an allowed key"
    expect_finite(session.unscripted(others, output.code), because)


@property_of(
    "MSK-8",
    Domain(masks=("empty_rows",), inputs=("cross", "self"), max_length=3),
    level="SHOULD",
    max_cases=2,
    must_reject=(),
    number=4,
)
def empty_rows_give_zeros(session: Session, case: Case) -> None:
    """The declared policy should be "zeros"."""
    policy = session.claims.empty_row
    expect(policy == "zeros", f"the declared policy is {policy!r}, but should be 'zeros'")


@property_of("MSK-9", Domain(masks=EMPTY, causal=BOTH), needs="empty_row=zeros|nan|uniform")
def empty_rows_leave_other_rows_alone(session: Session, case: Case) -> None:
    """A row without an allowed key changes no other row."""
    problem = case.problem()
    with_keys = problem.allowed(session.claims.alignment).any(-1).all(1)
    assume(bool(with_keys.any()), "every row is empty")
    filled = _filled(problem, session.claims)
    if filled is None:
        output = session(problem).output
        because = "other rows have no allowed key, but these have one"
        _expect_rows(with_keys.unsqueeze(-1), output, session.expected(problem).output, because)
        return
    _expect_rows_of_filled(session, problem, filled, with_keys)


def _expect_rows_of_filled(
    session: Session, problem: Problem, filled: Problem, with_keys: Tensor
) -> None:
    """Expect some rows, boolean (B, L), to be the same where the others see every key."""
    base, result = session(filled), session(problem)
    expected = session.expected(filled), session.expected(problem)
    because = f"the result where the empty rows may attend to every key ({base.output.code})"
    reach = expected[0].output.rad + expected[1].output.rad
    _expect_rows(
        with_keys.unsqueeze(-1), result.output, Ball(base.output.tensor.double(), reach), because
    )
    if result.weights is not None and base.weights is not None:
        reach = expected[0].weights.rad + expected[1].weights.rad
        rows = with_keys[:, None, :, None]
        _expect_rows(rows, result.weights, Ball(base.weights.tensor.double(), reach), because)


@property_of(
    "MSK-9",
    EMPTY_WITH_GRADIENT,
    needs=("gradients", "empty_row=zeros|uniform"),
    requires="HED-1",
    must_reject=("nan_gradients", "lopsided"),
    number=2,
)
def empty_rows_leave_other_gradients_alone(session: Session, case: Case) -> None:
    """A row without an allowed key does not change the gradients of other rows."""
    problem = case.problem()
    is_right = _is_within(session(problem).output.tensor, session.expected(problem).output)
    if session.claims.empty_row == "zeros" and is_right:
        expect_gradients(session, problem, None, "to which rows without an allowed key add nothing")
        return
    with_keys = problem.allowed(session.claims.alignment).any(-1).all(1)
    assume(bool(with_keys.any()), "every row is empty")
    expect_gradients(session, problem, with_keys, "of the rows that have an allowed key")


@property_of(
    "MSK-9",
    EMPTY_WITH_GRADIENT,
    needs=("gradients", "empty_row=nan"),
    requires="HED-1",
    level="SHOULD",
    must_reject=("nan_gradients", "lopsided"),
    number=3,
)
def rows_of_nan_leave_other_gradients_alone(session: Session, case: Case) -> None:
    """A row that is NaN by policy does not change the gradients of other rows."""
    empty_rows_leave_other_gradients_alone(session, case)


def _filled(problem: Problem, claims: Claims) -> Problem | None:
    """Return the problem with its empty rows unmasked; None where no claimed mask says so."""
    mask = problem.mask
    assert mask is not None
    empty = ~problem.allowed(claims.alignment).any(-1, keepdim=True)
    if mask.shape[1] == 1:
        empty = empty[:, :1]
    differs = claims.per_item_mask, claims.per_head_mask, claims.per_query_mask
    for axis, claimed in enumerate(differs):
        if not claimed and not _is_shared(empty, axis):
            return None
        empty = empty if claimed else empty.narrow(axis, 0, 1)
    if not claims.joint_masks and not (_is_shared(empty, 0) or _is_shared(empty, 2)):
        return None
    if mask.dtype == torch.bool:
        return problem.change(mask=mask | empty)
    return problem.change(mask=torch.where(empty, 0.0, mask))


def _is_within(output: Tensor, expected: Ball) -> bool:
    return bool(((output - expected.mid).abs() <= expected.rad).all())


def _is_shared(mask: Tensor, axis: int) -> bool:
    """Return whether a mask does not differ along an axis."""
    return torch.equal(mask, mask.narrow(axis, 0, 1).expand_as(mask))


def _expect_rows(rows: Tensor, actual: RecordedTensor, expected: Ball, because: str) -> None:
    """Expect values in some rows, whatever the others hold."""
    value = torch.where(rows, expected.mid, actual.tensor.double())
    expect_close(actual, Ball(value, expected.rad), because=because)


@property_of("MSK-11", Domain(masks=("all", *BOOLEAN), causal=BOTH, passes=("bool", "float")))
def additive_and_boolean_masks_agree(session: Session, case: Case) -> None:
    """The additive and the boolean form of one mask agree."""
    problem = case.problem()
    assert problem.mask is not None
    additive = problem.change(mask=to_convention(problem.mask, "additive", problem.query.dtype))
    output, expected = session(additive).output, session(problem).output
    expect_agree(
        output,
        expected,
        session.bound_of(problem),
        because="the result for the boolean form of the mask",
    )


@property_of(
    "MSK-11",
    Domain(masks=FLOAT, values=MODERATE, min_S=2),
    requires="HED-1",
    must_reject=("unmasked", "zeros"),
    number=2,
)
def additive_mask_is_a_bias_on_the_scores(session: Session, case: Case) -> None:
    """The finite entries of an additive mask are added to the scores."""
    problem = case.problem()
    actual = session(problem).output
    expected = session.expected(problem).output
    expect_close(actual, expected, because="the entries of the mask are added to the scores")


@property_of(
    "MSK-11",
    Domain(passes=("float",), min_S=2, bias=("v",), values=MODERATE, dtypes=WIDE_RANGE),
    requires="HED-1",
    level="SHOULD",
    must_reject=("zeros", "lopsided", "slightly_lopsided"),
    number=3,
)
def the_lowest_number_is_not_infinity(session: Session, case: Case) -> None:
    """A mask row of the lowest number, or of -1e9, is not an empty row: its weights sum to 1."""
    problem = passing_heads(case.problem())
    assert problem.weights.b_v is not None
    problem = problem.change(w_v=problem.weights.w_v * 0, b_v=torch.ones_like(problem.weights.b_v))
    lowest = -1e9 if case.seed % 3 == 2 else torch.finfo(problem.query.dtype).min
    rows = case.L if session.claims.per_query_mask else 1
    mask = torch.zeros(1, 1, rows, case.S, dtype=problem.query.dtype, device=problem.query.device)
    mask[..., torch.rand(mask.shape[2:], generator=case.generator) < 0.5] = lowest
    if session.claims.rounding.log_normaliser:
        # The rounding of a log-sum-exp as large as `lowest` would leave nothing of the weights.
        mask[..., 0] = 0.0
    else:
        mask[:, :, case.seed % rows] = lowest
    output = session(problem.change(mask=mask)).output
    # Whatever the scores are, a row of weights sums to 1, rounded as without the mask.
    expected = session.expected(problem).output
    because = f"each row of weights sums to 1, also where the mask is {lowest:.3g} everywhere"
    expect_close(output, expected, because=because)
