"""LSE: the log-sum-exp of the scores, beside the context."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.mask_kinds import BOOLEAN, COMMON, EMPTY, FLOAT
from mha.conformance.cases.memory_layouts import leaf_of
from mha.conformance.cases.transforms import select_keys
from mha.conformance.harness.assertions import assume, expect, expect_close
from mha.conformance.harness.differentiation import differentiate
from mha.conformance.harness.errors import Violation
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.recording import RecordedTensor
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.domains import NEEDS_OPTIONS, SEVERAL_OPTIONS
from mha.conformance.properties.support.shared_assertions import (
    assume_answered,
    assume_taken_together,
    has_empty_row,
    input_gradients,
)
from mha.spec import Lse, Problem
from mha.spec.bounds import Ball

OF_ALL_MASKS = Domain(
    masks=("none", *BOOLEAN, *FLOAT, *EMPTY), causal=BOTH, values=(*MODERATE, "large"), lse=(True,)
)
# What a wrong log-sum-exp may be, made of the natural one, (B, H, L).
READINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "that to base 2": lambda natural: natural / math.log(2),
    "the natural one": lambda natural: natural,
    "the sum itself": torch.exp,
    "of the other sign": lambda natural: -natural,
}
# What a merge in float64 adds, of the contexts: two sums, a quotient, a product, an exponential,
# and two roundings of a difference d, which has a share of e^-d.
OWN_ROUNDING = 7 * torch.finfo(torch.float64).eps
# How near a wrong one is to a reading that names it.
NEAR = 0.02


@property_of(
    "LSE-1",
    replace(OF_ALL_MASKS, variants=("plain", "grouped")),
    needs="lse",
    requires="HED-1",
    must_reject=("lopsided", "lse_of_all_keys", "lse_of_the_rest"),
)
def the_log_sum_exp_is_that_of_the_scores(session: Session, case: Case) -> None:
    """The log-sum-exp is within the bound of the oracle's, and so is the context beside it."""
    _expect_lse(session, case.problem())


def _expect_lse(session: Session, problem: Problem) -> None:
    """Expect the oracle's log-sum-exp and output."""
    assume_answered(session, problem)
    result, expected = session(problem, need_weights=False), session.expected(problem)
    declared = session.claims.lse or Lse()
    assert result.lse is not None
    try:
        expect_close(
            result.lse,
            expected.lse,
            because=f"the log-sum-exp of the scores, to base {declared.base}",
        )
    except Violation as violation:
        if reading := _reading_of(result.lse, expected.lse, declared):
            violation.message += f"; it is {reading}"
        raise
    expect_close(
        result.output, expected.output, because="the oracle's value, with a log-sum-exp beside it"
    )


@property_of(
    "LSE-1",
    replace(SEVERAL_OPTIONS, lse=(True,)),
    needs=("lse", NEEDS_OPTIONS),
    requires="LSE-1",
    must_reject=("lopsided", "lse_of_the_rest"),
    max_cases=24,
    number=3,
)
def the_log_sum_exp_goes_with_other_options(session: Session, case: Case) -> None:
    """With other options on the scores, the log-sum-exp and the context are within the bound."""
    problem = case.problem()
    assume_lse_determined(session, problem)
    assume_taken_together(session, problem)
    _expect_lse(session, problem)


def assume_lse_determined(session: Session, problem: Problem) -> None:
    """Discard a case whose options leave open what the log-sum-exp is."""
    declared, options = session.claims.scores.alibi, problem.options
    from_anywhere = declared is not None and declared.origin == "any"
    assume(options.alibi is None or not from_anywhere, "slopes may count from any place")
    keyless = has_empty_row(session, problem.change(sinks=None))
    assume(options.sinks is None or not keyless, "a row has a sink, and no key")


def _reading_of(lse: RecordedTensor, expected: Ball, declared: Lse) -> str:
    """Return in words what a wrong log-sum-exp is instead, where that is known; else ""."""
    natural = expected.mid * declared.log_base
    actual = lse.tensor.detach().double()
    own = "that to base 2" if declared.base == "2" else "the natural one"
    for reading, of in READINGS.items():
        value = of(natural)
        known = value.isfinite()
        near = (actual - value).abs() <= NEAR * value.abs().clamp(min=NEAR)
        if reading != own and bool(known.any()) and bool(near[known].all()):
            return reading
    return ""


@property_of(
    "LSE-3",
    Domain(
        masks=COMMON,
        causal=BOTH,
        values=MODERATE,
        modes=WITH_GRADIENT,
        dtypes=BOUNDED,
        need_weights=(False,),
        lse=(True,),
    ),
    needs=("lse.gradient", "gradients"),
    requires="LSE-1",
    must_reject=("lopsided", "lse_detached"),
    max_cases=40,
)
def the_log_sum_exp_has_its_gradient(session: Session, case: Case) -> None:
    """The gradients of a loss of output and log-sum-exp are within the bound of the oracle's."""
    problem = case.problem()
    assume(not has_empty_row(session, problem), "a row is empty, whose log-sum-exp is infinite")
    _expect_gradients_with_lse(session, case, problem)


def _expect_gradients_with_lse(session: Session, case: Case, problem: Problem) -> None:
    """Expect the oracle's gradients of a loss of output and log-sum-exp."""
    upstream = session.upstream(problem)
    drawn = torch.randint(-2, 3, problem.shape[:3], generator=case.generator)
    upstream_lse = drawn.to(problem.query.device, torch.float64)
    leaves = problem.map_inputs(leaf_of)
    result = session.forward_all(leaves)
    assert result.lse is not None
    with guarded("backward() of output and log-sum-exp"):
        of_lse = upstream_lse.to(result.lse.tensor.dtype)
        differentiate(result.output.tensor, upstream, others=[(result.lse.tensor, of_lse)])
    expected = session.expected_gradients(problem, upstream, upstream_lse)
    for name, gradient in input_gradients(session, leaves).items():
        expect_close(
            gradient, expected[name], because="the gradient of a loss of output and log-sum-exp"
        )


@property_of(
    "LSE-3",
    replace(
        SEVERAL_OPTIONS, modes=WITH_GRADIENT, dtypes=BOUNDED, need_weights=(False,), lse=(True,)
    ),
    needs=("lse.gradient", "gradients", NEEDS_OPTIONS),
    requires="LSE-1",
    must_reject=("lopsided", "lse_detached"),
    max_cases=24,
    number=2,
)
def the_gradient_of_the_log_sum_exp_goes_with_other_options(session: Session, case: Case) -> None:
    """With other options on the scores, the gradients of such a loss are within the bound."""
    problem = case.problem()
    assume_lse_determined(session, problem)
    assume(not has_empty_row(session, problem), "a row is empty, whose log-sum-exp is infinite")
    assume_taken_together(session, problem)
    _expect_gradients_with_lse(session, case, problem)


OF_PARTS = Domain(
    masks=("none", *BOOLEAN, *EMPTY),
    causal=(False,),
    inputs=("cross",),
    values=(*MODERATE, "low"),
    need_weights=(False,),
    lse=(True,),
)


@property_of(
    "LSE-2",
    OF_PARTS,
    needs=("lse", "projections=False"),
    requires="LSE-1",
    must_reject=("lopsided", "lse_of_all_keys"),
    reads_empty_rows=False,  # the merge gives a part without a key no weight
    max_cases=40,
)
def parts_of_the_keys_merge_to_the_whole(session: Session, case: Case) -> None:
    """Contexts and log-sum-exps of two parts of the keys, merged here, are those of the whole."""
    problem = case.problem()
    keys = problem.shape[3]
    assume(keys > 1, "there is one key")
    assume(not problem.is_self, "a query goes with each key")
    assume_answered(session, problem)
    cut = 1 + case.seed % (keys - 1)
    parts = [_of_keys(problem, part) for part in (slice(None, cut), slice(cut, None))]
    declared = session.claims.lse or Lse()
    if declared.empty == "undefined":
        empty = any(has_empty_row(session, part) for part in parts)
        assume(not empty, "the log-sum-exp of an empty row is undefined")
    first, second = (_called_with_lse(session, part, declared) for part in parts)
    merged = _merge(first, second, declared)
    expected = _merged_bound(session, problem, parts, declared)
    session.scripted = False  # the merge is the judge's own
    outside = ~((merged - expected.mid).abs() <= expected.rad)
    if bool(outside.any()):
        place = tuple(outside.nonzero()[0].tolist())
        expect(
            False,
            f"contexts of keys 0 to {cut - 1} and {cut} to {keys - 1}, merged by their"
            f" log-sum-exps, give {float(merged[place]):.6g} at {list(place)} of the output, but"
            f" should give {float(expected.mid[place]):.6g}"
            f" (bound on rounding: {float(expected.rad[place]):.2g})",
        )


@property_of(
    "LSE-2",
    replace(OF_PARTS, masks=("none", *BOOLEAN, *FLOAT, *EMPTY)),
    number=2,
    needs=("lse", "split_keys"),
    requires="LSE-1",
    must_reject=("lopsided", "lse_of_all_keys"),
)
def any_split_of_the_keys_gives_the_whole(session: Session, case: Case) -> None:
    """An attention that merges parts of its keys gives the oracle's result for any split."""
    problem = case.problem()
    assume_answered(session, problem)
    sizes = _split(problem.shape[3], case.seed)
    merging = session.derive(
        session.built(problem),
        lambda attention: attention.split_keys(sizes),
        f"{{}}.split_keys({sizes})",
    )
    result, expected = session(problem, via=merging), session.expected(problem)
    parts = ", ".join(map(str, sizes))
    expect_close(
        result.output, expected.output, because=f"the oracle's value, from parts of {parts} keys"
    )
    assert result.lse is not None
    expect_close(
        result.lse, expected.lse, because=f"the log-sum-exp of all keys, from parts of {parts} keys"
    )


def _split(keys: int, seed: int) -> tuple[int, ...]:
    """Return the sizes of parts: with no empty one, with one at either end or between, or two."""
    cut = (1 + seed % keys) if keys else 0
    rest = keys - cut
    splits = ((cut, rest), (0, keys), (keys, 0), (0, 0, cut, rest), (cut, 0, 0, rest), (0, 0, keys))
    return splits[seed // 7 % len(splits)]


def _of_keys(problem: Problem, part: slice) -> Problem:
    """Return the problem of some of the keys, with their part of the mask."""
    keys = problem.shape[3]
    numbers = torch.arange(keys, device=problem.key.device)[part]
    mask = problem.mask
    if mask is not None and mask.shape[-1] == keys:
        mask = mask[..., part]
    return select_keys(problem, numbers).change(mask=mask)


def _called_with_lse(session: Session, problem: Problem, declared: Lse) -> tuple[Tensor, Tensor]:
    """Return output (B, L, H d_v) and log-sum-exp (B, H, L) of a call, in float64."""
    result = session(problem)
    assert result.lse is not None
    return result.output.tensor.double(), _plain(result.lse.tensor.double(), declared)


def _plain(lse: Tensor, declared: Lse) -> Tensor:
    """Return a log-sum-exp to its declared base, with -infinity for an empty row."""
    if declared.empty == "+inf":
        return lse.masked_fill(lse == math.inf, -math.inf)
    return lse


def _shares(one: Tensor, other: Tensor, width: int, declared: Lse) -> tuple[Tensor, Tensor]:
    """Return the weights of two parts for each column (B, L, H d_v); zeros where both are empty."""
    both = torch.stack([one, other])
    largest = both.amax(0)
    # Only differences are multiplied or raised: a rounding of the whole grows with its size.
    below = (both - largest.masked_fill(largest == -math.inf, 0.0)) * declared.log_base
    raised = below.exp()
    shares = raised / raised.sum(0).clamp(min=1.0)  # a sum is 0 where both are empty, or at least 1
    by_column = shares.transpose(2, 3).repeat_interleave(width // one.shape[1], -1)
    return by_column[0], by_column[1]


def _merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], declared: Lse) -> Tensor:
    """Return the output of two parts of the keys."""
    (output, lse), (other, other_lse) = first, second
    share, other_share = _shares(lse, other_lse, output.shape[-1], declared)
    return share * output + other_share * other


def _merged_bound(session: Session, problem: Problem, parts: list[Problem], declared: Lse) -> Ball:
    """Return the output of all keys, with the bound of one that is merged from two parts.

    Each part may be off by its own bound, and the shares by a factor e^(2 d), where d is the
    largest error of a log-sum-exp of the row. The merge is the judge's own, in float64.
    """
    whole = session.expected(problem).output
    of_parts = [session.expected(part) for part in parts]
    one, other = (_plain(expected.lse.mid, declared) for expected in of_parts)
    shares = _shares(one, other, whole.mid.shape[-1], declared)
    rad, spread = torch.zeros_like(whole.rad), torch.zeros_like(whole.rad)
    errors = []
    for share, lse, expected in zip(shares, (one, other), of_parts, strict=True):
        has_keys = share > 0  # elsewhere, a bound may be infinite
        reach = expected.output.rad + OWN_ROUNDING * expected.output.mid.abs()
        rad += torch.where(has_keys, share * reach, 0.0)
        spread += share * (expected.output.mid - whole.mid).abs()
        errors.append(torch.where(lse > -math.inf, expected.lse.rad, 0.0))
    largest = torch.maximum(*errors) * declared.log_base
    grown = (2 * largest).exp().transpose(1, 2)
    grown = grown.repeat_interleave(whole.mid.shape[-1] // grown.shape[-1], -1)
    moved = torch.where(spread > 0, (grown - 1) * spread, 0.0)
    return Ball(whole.mid, rad * grown + moved + whole.rad)
