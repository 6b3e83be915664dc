"""PTH: one result, whichever code runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, DENSE, MODERATE, PATHS, USUAL, WITH_GRADIENT, Domain
from mha.conformance.cases.masks import BOOLEAN, EMPTY, FLOAT
from mha.conformance.cases.transforms import as_wide_as_claimed
from mha.conformance.harness.assertions import expect_agree, expect_close, need
from mha.conformance.harness.errors import Refusal
from mha.conformance.harness.recording import Observed
from mha.conformance.harness.session import Trial
from mha.conformance.properties.registry import checks
from mha.conformance.properties.shared import expect_answer, expect_gradients, refuses, weights_of
from mha.spec import Claims, Problem, Weights, causal_mask, join_causal, to_convention

ANY_MASK = ("none", *BOOLEAN, *FLOAT, *EMPTY)
ONE_PATH = ("eval",)


@checks("PTH-1", Domain(masks=ANY_MASK, causal=BOTH, need_weights=(False,)), needs="returns_weights")
def asking_for_weights_changes_no_output(attention: Trial, case: Case) -> None:
    problem = case.problem()
    need(not refuses(attention, problem), "a row is empty, and the declared policy is 'error'")
    bound = attention.answer(problem).output
    without, with_weights = (attention(problem, need_weights=asked).output for asked in (False, True))
    because = f"what the call with need_weights=True gives on the path {case.path!r}"
    expect_agree(without, with_weights, bounds=(bound, bound), because=because)


def _expect_one_result(attention: Trial, case: Case) -> None:
    problem = case.problem()
    need(not refuses(attention, problem), "a row is empty, and the declared policy is 'error'")
    bound, base = attention.answer(problem).output, attention(problem).output
    for path in PATHS[1:]:
        seen = attention(problem, path=path).output
        expect_agree(seen, base, bounds=(bound, bound), because=f"{path!r} against what {case.path!r} gives")


@checks("PTH-2", Domain(masks=ANY_MASK, causal=BOTH, paths=ONE_PATH))
def modes_change_no_output(attention: Trial, case: Case) -> None:
    _expect_one_result(attention, case)


# Where libraries take another way without gradients: one tensor for all three inputs, and no weights wanted.
FAST = Domain(
    masks=("none", "padding", "queries", *EMPTY),
    causal=BOTH,
    paths=ONE_PATH,
    inputs=("self",),
    need_weights=(False,),
    bias=(True,),
    min_heads=2,
)


@checks("PTH-2", FAST, number=2)
def modes_change_no_output_of_self_attention(attention: Trial, case: Case) -> None:
    _expect_one_result(attention, case)


@checks("PTH-3", Domain(masks=("all", *BOOLEAN), causal=BOTH, passes=("bool",), regimes=USUAL))
def forms_of_one_mask_agree(attention: Trial, case: Case) -> None:
    problem, claims = case.problem(), attention.claims
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
        bound = attention.answer(forms["boolean"]).output
        base = attention(forms.pop("boolean")).output
        for form, same in forms.items():
            seen = attention(same).output
            expect_agree(seen, base, bounds=(bound, bound), because=f"the mask {form} is the same mask")


@checks(
    "PTH-4",
    Domain(masks=(*BOOLEAN, *FLOAT), causal=(True,), square=True, min_L=2, min_S=2, regimes=MODERATE),
    after="HED-1",
    rejects=("unmasked", "noise"),
)
def a_hint_never_overrides_the_mask(attention: Trial, case: Case) -> None:
    problem = case.problem()
    try:
        seen = attention(problem).output
    except Refusal:
        return  # the clause allows the two together to be refused
    expect_close(seen, attention.answer(problem).output, because="both the mask and the causal flag count")


EXTRA = Domain(
    regimes=MODERATE,
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


def _call_with_extras(attention: Trial, problem: Problem, extras: Sequence[str]) -> Observed:
    """Call it in the form that the extras have; return the output in the usual one."""
    if "unbatched" in extras:
        mask = None if problem.mask is None else problem.mask[0] if problem.mask.shape[1] > 1 else problem.mask[0, 0]
        called = problem.map_inputs(lambda x: x[0]).change(mask=mask)
        return attention(called).output.map(lambda x: x.unsqueeze(0), "{}.unsqueeze(0)")
    if "length_first" in extras:
        called = problem.map_inputs(lambda x: x.transpose(0, 1))
        return attention(called).output.map(lambda x: x.transpose(0, 1), "{}.transpose(0, 1)")
    return attention(problem).output


@checks("PTH-5", EXTRA, needs="extras", after="HED-1", rejects=("zeros", "noise"))
def extras_match_the_oracle(attention: Trial, case: Case) -> None:
    _expect_extras(attention, case)


@checks(
    "PTH-5", replace(EXTRA, masks=EMPTY), needs="extras", after="HED-1", rejects=("zeros", "noise"), limit=12, number=2
)
def extra_keys_are_left_to_rows_without_others(attention: Trial, case: Case) -> None:
    _expect_extras(attention, case)


def _expect_extras(attention: Trial, case: Case) -> None:
    """With each extra that is claimed, and with two at once, the results are the oracle's."""
    claimed = sorted(attention.claims.extras)
    pairs = [pair for pair in combinations(claimed, 2) if pair != ("length_first", "unbatched")]
    several = pairs[case.seed % max(1, len(pairs)) :][:1]
    judged = False
    for extras in (*[(extra,) for extra in claimed], *several):
        problem = case.problem()
        for extra in extras:
            problem = with_extra(problem, case, extra)
        if refuses(attention, problem):
            continue
        judged = True
        answer, because = attention.answer(problem), f"the oracle's value with {' and '.join(extras)}"
        expect_close(_call_with_extras(attention, problem, extras), answer.output, because=because)
        if problem.config.extra_keys and not problem.config.length_first and attention.claims.returns_weights:
            seen = attention(problem, need_weights=True)
            weights_of(seen)
            expect_answer(seen, answer, because)
    need(judged, "a row is empty, and the declared policy is 'error'")


@checks(
    "PTH-5",
    replace(EXTRA, paths=WITH_GRADIENT),
    needs="extras",
    after="HED-1",
    rejects=("wild", "detached"),
    floor=0.3,
    number=3,
)
def extra_keys_have_gradients(attention: Trial, case: Case) -> None:
    keys = extra_keys(attention.claims)
    need(attention.claims.gradients and bool(keys), "needs the claim gradients, and extras that add a key")
    problem = case.problem()
    for extra in keys:
        expect_gradients(attention, with_extra(problem, case, extra), None, f"with the extra {extra!r}")
        problem = with_extra(problem, case, extra)  # the last has all that are claimed
