"""PTH: one result, whichever path of the code runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import (
    ALL_MODES,
    BOTH,
    DENSE,
    FEW_VALUES,
    MODERATE,
    WITH_GRADIENT,
    Domain,
)
from mha.conformance.cases.mask_kinds import BOOLEAN, EMPTY, FLOAT, NO_EMPTY_ROWS
from mha.conformance.cases.transforms import as_claimed, as_wide_as_claimed, extra_keys, with_extra
from mha.conformance.harness.assertions import assume, expect_agree, expect_close
from mha.conformance.harness.errors import CallRaised
from mha.conformance.harness.recording import RecordedTensor
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.shared_assertions import (
    expect_gradients,
    expect_result,
    refuses,
    weights_of,
)
from mha.spec import Claims, Problem, causal_mask, join_causal, to_convention
from mha.spec.masks import INTEGERS
from mha.spec.problem import INPUTS

ONE_MODE = ("eval",)
ALWAYS_RAISES = "a row has no allowed key, and the declared policy is 'error'"


@property_of(
    "PTH-1",
    Domain(masks=NO_EMPTY_ROWS, causal=BOTH, need_weights=(False,)),
    needs="returns_weights",
)
def asking_for_weights_changes_no_output(session: Session, case: Case) -> None:
    """need_weights on or off gives the same output."""
    problem = case.problem()
    assume(not refuses(session, problem), ALWAYS_RAISES)
    without, with_weights = (
        session(problem, need_weights=need_weights).output for need_weights in (False, True)
    )
    because = f"the result with need_weights=True (instead of False) in the mode {case.mode!r}"
    expect_agree(without, with_weights, session.bound_of(problem), because=because)


@property_of("PTH-2", Domain(masks=NO_EMPTY_ROWS, causal=BOTH, modes=ONE_MODE))
def modes_change_no_output(session: Session, case: Case) -> None:
    """train (without dropout), eval, no_grad and inference_mode give the same output."""
    _expect_one_result(session, case)


@property_of(
    "PTH-2",
    # Libraries take a fast path without gradients where one tensor is all three inputs and no
    # weights are asked for.
    Domain(
        masks=("none", "padding", "queries"),
        causal=BOTH,
        modes=ONE_MODE,
        inputs=("self",),
        need_weights=(False,),
        bias=(True,),
        min_heads=2,
    ),
    number=2,
)
def modes_change_no_output_of_self_attention(session: Session, case: Case) -> None:
    """The same for self-attention, where fast paths are common."""
    _expect_one_result(session, case)


def _expect_one_result(session: Session, case: Case) -> None:
    """Expect the output to agree in all modes."""
    problem = case.problem()
    assume(not refuses(session, problem), ALWAYS_RAISES)
    bound, base = session.bound_of(problem), session(problem).output
    for mode in ALL_MODES[1:]:
        output = session(problem, mode=mode).output
        because = f"the result in the mode {case.mode!r} (instead of {mode!r})"
        expect_agree(output, base, bound, because=because)


@property_of("PTH-3", Domain(masks=("all", *BOOLEAN), causal=BOTH, values=FEW_VALUES))
def forms_of_one_mask_agree(session: Session, case: Case) -> None:
    """One mask gives one output: as booleans, floats, integers, expanded, or as a causal flag."""
    problem, claims = case.problem(), session.claims
    assert problem.mask is not None
    items = case.B if claims.per_item_mask else 1
    padding = torch.arange(case.S) < 1 + torch.randint(
        case.S, (items, 1, 1, 1), generator=case.generator
    )
    # The first key stays allowed in every row: empty rows are for MSK-8.
    first = (torch.arange(case.S) == 0).to(case.device)
    given = problem.mask if problem.mask.dtype == torch.bool else problem.mask == 0
    masks = [(given | first) & padding.to(case.device)]
    # Beside padding, a mask of items is as wide as it can be; what is always causal has no flag.
    if claims.always_causal or not problem.is_causal:
        masks.insert(0, given)
    compared = False
    for mask in masks:
        boolean = problem.change(mask=mask | first)
        bound = session.bound_of(boolean)
        plain = as_claimed(claims, boolean, mask | first)
        base = session(plain).output
        for form, same in _forms(session, boolean).items():
            if _form(session, same) == _form(session, plain):
                continue
            compared = True
            output = session(same).output
            because = f"the result for the mask as it is (instead of the same mask {form})"
            expect_agree(output, base, bound, because=because)
    assume(compared, "the mask has one form")


def _form(session: Session, problem: Problem) -> tuple[object, ...]:
    """Return in what form the mask of a problem is given."""
    mask = session.in_a_claimed_form(problem).mask
    assert mask is not None
    return mask.shape, mask.stride(), mask.dtype, problem.is_causal


def _forms(session: Session, boolean: Problem) -> dict[str, Problem]:
    """Return the claimed forms of a problem with a boolean mask, except the first one."""
    claims, mask = session.claims, boolean.mask
    assert mask is not None
    forms = {"expanded": boolean.change(mask=as_wide_as_claimed(mask, boolean, claims))}
    if boolean.is_causal and claims.per_query_mask and not claims.always_causal:
        assert claims.causal is not None
        _, _, queries, keys = boolean.shape
        causal = causal_mask(queries, keys, claims.causal, boolean.query.device)
        forms["combined with the causal mask"] = boolean.change(
            mask=join_causal(mask, causal), is_causal=False
        )
    if "bool" not in claims.masks:
        return {form: _as_claimed(claims, same) for form, same in forms.items()}
    if "float" in claims.masks:
        additive = {"as 0 and -infinity": _as_additive(boolean)}
        for form, same in forms.items():
            additive[f"{form} as 0 and -infinity"] = _as_additive(same)
        forms |= additive
    if "int" in claims.masks:
        for dtype in INTEGERS:
            forms[f"as 1 and 0 in {dtype}"] = boolean.change(mask=mask.to(dtype))
    return forms


def _as_claimed(claims: Claims, boolean: Problem) -> Problem:
    """Return a problem with its boolean mask in a claimed form."""
    assert boolean.mask is not None
    return as_claimed(claims, boolean, boolean.mask)


def _as_additive(boolean: Problem) -> Problem:
    """Return a problem with its boolean mask as numbers, 0 and -infinity."""
    assert boolean.mask is not None
    mask = to_convention(boolean.mask, "additive", boolean.query.dtype)
    return boolean.change(mask=mask)


@property_of(
    "PTH-4",
    Domain(
        masks=(*BOOLEAN, *FLOAT),
        causal=(True,),
        may_raise=True,
        square=True,
        min_L=2,
        min_S=2,
        values=MODERATE,
    ),
    requires="HED-1",
    must_reject=("unmasked", "lopsided"),
)
def a_hint_never_overrides_the_mask(session: Session, case: Case) -> None:
    """A hint never overrides the mask: both apply, or the mask alone, or the call raises."""
    problem = case.problem()
    try:
        output = session(problem).output
    except CallRaised:
        return
    because = "both the mask and the causal flag apply"
    if session.claims.causal_with_mask == "mask_alone":
        problem = problem.change(is_causal=False)
        because = "the mask applies alone, as is claimed"
    expect_close(output, session.expected(problem).output, because=because)


WITH_EXTRAS = Domain(
    values=MODERATE, layouts=DENSE, masks=NO_EMPTY_ROWS, causal=BOTH, need_weights=(False,)
)


@property_of(
    "PTH-5", WITH_EXTRAS, needs="extras", requires="HED-1", must_reject=("zeros", "lopsided")
)
def extras_match_the_oracle(session: Session, case: Case) -> None:
    """With each claimed extra, and with two together, the result matches the oracle."""
    _expect_extras(session, case)


@property_of(
    "PTH-5",
    replace(WITH_EXTRAS, masks=EMPTY),
    needs="extras",
    requires="HED-1",
    must_reject=("zeros", "lopsided"),
    max_cases=12,
    number=2,
)
def empty_rows_attend_to_extra_keys(session: Session, case: Case) -> None:
    """The same where a mask leaves some rows only the extra keys, or none."""
    _expect_extras(session, case)


@property_of(
    "PTH-5",
    replace(WITH_EXTRAS, modes=WITH_GRADIENT),
    needs=("extras=bias_kv|zero_key", "gradients"),
    requires="HED-1",
    must_reject=("nan_gradients", "detached", "lopsided"),
    number=3,
)
def extra_keys_have_gradients(session: Session, case: Case) -> None:
    """With extra keys, the gradients match the oracle."""
    problem = case.problem()
    for extra in extra_keys(session.claims):
        problem = with_extra(problem, case, extra)  # the last problem has all extras
        expect_gradients(session, problem, None, f"with the extra {extra!r}")


@property_of(
    "PTH-5",
    replace(WITH_EXTRAS, modes=WITH_GRADIENT),
    needs=("extras=length_first|unbatched", "gradients"),
    requires="HED-1",
    must_reject=("nan_gradients", "detached", "lopsided"),
    max_cases=12,
    number=5,
)
def other_layouts_have_gradients(session: Session, case: Case) -> None:
    """With the length first, and without a batch, the gradients match the oracle."""
    for extra in sorted({"length_first", "unbatched"} & set(session.claims.extras)):
        problem = with_extra(case.problem(), case, extra)
        _expect_gradients(session, problem, extra)


def _expect_gradients(session: Session, problem: Problem, extra: str) -> None:
    """Expect the oracle's gradients where the call has another layout."""
    upstream, called = session.upstream(problem), _as_called(problem, (extra,))
    gradients = session.gradients(called, _laid_out(upstream, (extra,)))
    because = f"the gradient, with the extra {extra!r}"
    for name, expected in session.expected_gradients(problem, upstream).items():
        if name not in gradients:
            continue
        actual = gradients[name]
        if name in INPUTS:
            actual = _batch_first(actual, (extra,))
        if name == "mask":  # which may have fewer dimensions
            expected = expected[(0,) * (4 - actual.tensor.ndim)]
        expect_close(actual, expected, because=because)


def _expect_extras(session: Session, case: Case) -> None:
    """Expect the oracle's results with each claimed extra, and with one pair of them."""
    claimed = sorted(session.claims.extras)
    tried: list[tuple[str, ...]] = [(extra,) for extra in claimed]
    pairs = [pair for pair in combinations(claimed, 2) if pair != ("length_first", "unbatched")]
    if pairs:
        tried.append(pairs[case.seed % len(pairs)])
    any_called = False
    for extras in tried:
        problem = case.problem()
        for extra in extras:
            problem = with_extra(problem, case, extra)
        if refuses(session, problem):
            continue
        any_called = True
        because = f"the oracle's value with {' and '.join(extras)}"
        output = call_with_extras(session, problem, extras)
        expect_close(output, session.expected(problem).output, because=because)
        config = problem.config
        if config.extra_keys and not config.length_first and session.claims.returns_weights:
            result = session(problem, need_weights=True)
            weights_of(result)
            expect_result(result, session.expected(problem), because)
    assume(any_called, ALWAYS_RAISES)


def call_with_extras(session: Session, problem: Problem, extras: Sequence[str]) -> RecordedTensor:
    """Call with the inputs in the layout that the extras need; return the output as (B, L, D)."""
    return _batch_first(session(_as_called(problem, extras)).output, extras)


def _as_called(problem: Problem, extras: Sequence[str]) -> Problem:
    """Return the problem with inputs, and a mask, in the layout that the extras need."""
    mask = problem.mask
    if "unbatched" in extras and mask is not None:
        mask = mask[0] if mask.shape[1] > 1 else mask[0, 0]
    return problem.map_inputs(lambda x: _laid_out(x, extras)).change(mask=mask)


def _laid_out(x: Tensor, extras: Sequence[str]) -> Tensor:
    """Return a tensor (B, N, width) in the layout that the extras need."""
    if "unbatched" in extras:
        return x[0]
    return x.transpose(0, 1) if "length_first" in extras else x


def _batch_first(x: RecordedTensor, extras: Sequence[str]) -> RecordedTensor:
    """Return what is in the layout that the extras need as (B, N, width)."""
    if "unbatched" in extras:
        return x.map(lambda x: x.unsqueeze(0), "{}.unsqueeze(0)")
    if "length_first" in extras:
        return x.map(lambda x: x.transpose(0, 1), "{}.transpose(0, 1)")
    return x
