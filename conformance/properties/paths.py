"""PTH: one result, whichever code runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import ALL_MODES, BOTH, DENSE, MODERATE, TYPICAL, WITH_GRADIENT, Domain
from mha.conformance.cases.masks import BOOLEAN, EMPTY, FLOAT
from mha.conformance.cases.transforms import as_wide_as_claimed
from mha.conformance.harness.assertions import assume, expect_agree, expect_close
from mha.conformance.harness.errors import CallRaised
from mha.conformance.harness.recording import RecordedTensor
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.shared import expect_gradients, expect_result, refuses, weights_of
from mha.spec import Claims, Problem, Weights, causal_mask, join_causal, to_convention

ANY_MASK = ("none", *BOOLEAN, *FLOAT, *EMPTY)
ONE_MODE = ("eval",)


@property_of("PTH-1", Domain(masks=ANY_MASK, causal=BOTH, need_weights=(False,)), needs="returns_weights")
def asking_for_weights_changes_no_output(session: Session, case: Case) -> None:
    problem = case.problem()
    assume(not refuses(session, problem), "a row is empty, and the declared policy is 'error'")
    bound = session.expected(problem).output
    without, with_weights = (session(problem, need_weights=asked).output for asked in (False, True))
    because = f"what the call with need_weights=True gives on the path {case.mode!r}"
    expect_agree(without, with_weights, bounds=(bound, bound), because=because)


def _expect_one_result(session: Session, case: Case) -> None:
    problem = case.problem()
    assume(not refuses(session, problem), "a row is empty, and the declared policy is 'error'")
    bound, base = session.expected(problem).output, session(problem).output
    for mode in ALL_MODES[1:]:
        seen = session(problem, mode=mode).output
        expect_agree(seen, base, bounds=(bound, bound), because=f"{mode!r} against what {case.mode!r} gives")


@property_of("PTH-2", Domain(masks=ANY_MASK, causal=BOTH, modes=ONE_MODE))
def modes_change_no_output(session: Session, case: Case) -> None:
    _expect_one_result(session, case)


# Where libraries take another way without gradients: one tensor for all three inputs, and no weights wanted.
FAST = Domain(
    masks=("none", "padding", "queries", *EMPTY),
    causal=BOTH,
    modes=ONE_MODE,
    inputs=("self",),
    need_weights=(False,),
    bias=(True,),
    min_heads=2,
)


@property_of("PTH-2", FAST, number=2)
def modes_change_no_output_of_self_attention(session: Session, case: Case) -> None:
    _expect_one_result(session, case)


@property_of("PTH-3", Domain(masks=("all", *BOOLEAN), causal=BOTH, passes=("bool",), values=TYPICAL))
def forms_of_one_mask_agree(session: Session, case: Case) -> None:
    problem, claims = case.problem(), session.claims
    assert problem.mask is not None
    items = case.B if claims.per_item_mask else 1
    padding = torch.arange(case.S) < 1 + torch.randint(case.S, (items, 1, 1, 1), generator=case.generator)
    # The first key of a row stays: an empty row is for MSK-8.
    first = (torch.arange(case.S) == 0).to(case.device)
    masks = [problem.mask, (problem.mask | first) & padding.to(case.device)]
    for mask in masks if not problem.is_causal else masks[1:]:
        forms = {"boolean": problem.change(mask=mask | first)}
        forms["expanded"] = problem.change(mask=as_wide_as_claimed(mask | first, problem, claims))
        if problem.is_causal and claims.per_query_mask and not claims.always_causal:
            assert claims.causal is not None
            causal = causal_mask(case.L, case.S, claims.causal, problem.query.device)
            forms["with the causal flag written out"] = problem.change(
                mask=join_causal(mask | first, causal), is_causal=False
            )
        if "float" in claims.masks:
            forms |= {
                f"{form}, of 0 and -infinity": same.change(
                    mask=to_convention(same.mask, "additive", problem.query.dtype)
                )
                for form, same in list(forms.items())
                if same.mask is not None
            }
        bound = session.expected(forms["boolean"]).output
        base = session(forms.pop("boolean")).output
        for form, same in forms.items():
            seen = session(same).output
            expect_agree(seen, base, bounds=(bound, bound), because=f"the mask {form} is the same mask")


@property_of(
    "PTH-4",
    Domain(masks=(*BOOLEAN, *FLOAT), causal=(True,), square=True, min_L=2, min_S=2, values=MODERATE),
    requires="HED-1",
    must_reject=("unmasked", "noise"),
)
def a_hint_never_overrides_the_mask(session: Session, case: Case) -> None:
    problem = case.problem()
    try:
        seen = session(problem).output
    except CallRaised:
        return  # the clause allows the two together to be refused
    expect_close(seen, session.expected(problem).output, because="both the mask and the causal flag count")


EXTRA = Domain(
    values=MODERATE,
    layouts=DENSE,
    masks=("none", *BOOLEAN, *FLOAT),
    causal=BOTH,
    need_weights=(False,),
)


def extra_keys(claims: Claims) -> list[str]:
    """Return the claimed extras that add a key."""
    return sorted({"bias_kv", "zero_key"} & set(claims.extras))


def with_extra(problem: Problem, case: Case, extra: str) -> Problem:
    """Return the problem with one extra more; what is to be "unbatched" has one item, still batched."""
    if extra == "unbatched":
        mask = problem.mask if problem.mask is None or problem.mask.shape[0] == 1 else problem.mask[:1]
        return problem.map_inputs(lambda x: x[:1]).change(mask=mask)
    weights = problem.weights
    if extra == "bias_kv":
        drawn = Weights.random(replace(problem.config, bias_kv=True), case.seed).to(problem.query.dtype, case.device)
        weights = replace(weights, extra_k=drawn.extra_k, extra_v=drawn.extra_v)
    return problem.change(config=replace(problem.config, **{extra: True}), weights=weights)


def _call_with_extras(session: Session, problem: Problem, extras: Sequence[str]) -> RecordedTensor:
    """Call it in the form that the extras have; return the output in the usual one."""
    if "unbatched" in extras:
        mask = None if problem.mask is None else problem.mask[0] if problem.mask.shape[1] > 1 else problem.mask[0, 0]
        called = problem.map_inputs(lambda x: x[0]).change(mask=mask)
        return session(called).output.map(lambda x: x.unsqueeze(0), "{}.unsqueeze(0)")
    if "length_first" in extras:
        called = problem.map_inputs(lambda x: x.transpose(0, 1))
        return session(called).output.map(lambda x: x.transpose(0, 1), "{}.transpose(0, 1)")
    return session(problem).output


@property_of("PTH-5", EXTRA, needs="extras", requires="HED-1", must_reject=("zeros", "noise"))
def extras_match_the_oracle(session: Session, case: Case) -> None:
    _expect_extras(session, case)


@property_of(
    "PTH-5",
    replace(EXTRA, masks=EMPTY),
    needs="extras",
    requires="HED-1",
    must_reject=("zeros", "noise"),
    max_cases=12,
    number=2,
)
def extra_keys_are_left_to_rows_without_others(session: Session, case: Case) -> None:
    _expect_extras(session, case)


def _expect_extras(session: Session, case: Case) -> None:
    """With each extra that is claimed, and with two at once, the results are the oracle's."""
    claimed = sorted(session.claims.extras)
    pairs = [pair for pair in combinations(claimed, 2) if pair != ("length_first", "unbatched")]
    several = pairs[case.seed % max(1, len(pairs)) :][:1]
    judged = False
    for extras in (*[(extra,) for extra in claimed], *several):
        problem = case.problem()
        for extra in extras:
            problem = with_extra(problem, case, extra)
        if refuses(session, problem):
            continue
        judged = True
        answer, because = session.expected(problem), f"the oracle's value with {' and '.join(extras)}"
        expect_close(_call_with_extras(session, problem, extras), answer.output, because=because)
        if problem.config.extra_keys and not problem.config.length_first and session.claims.returns_weights:
            seen = session(problem, need_weights=True)
            weights_of(seen)
            expect_result(seen, answer, because)
    assume(judged, "a row is empty, and the declared policy is 'error'")


@property_of(
    "PTH-5",
    replace(EXTRA, modes=WITH_GRADIENT),
    needs=("extras=bias_kv|zero_key", "gradients"),
    requires="HED-1",
    must_reject=("nan_gradients", "detached"),
    min_rejection_rate=0.3,
    number=3,
)
def extra_keys_have_gradients(session: Session, case: Case) -> None:
    keys = extra_keys(session.claims)
    problem = case.problem()
    for extra in keys:
        expect_gradients(session, with_extra(problem, case, extra), None, f"with the extra {extra!r}")
        problem = with_extra(problem, case, extra)  # the last has all that are claimed
