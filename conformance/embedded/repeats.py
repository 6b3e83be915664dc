"""What one call does not show: caches, memory that was not written, bits that differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha.conformance.embedded.calling import NotExpressed
from mha.conformance.embedded.cases import BuiltCase, KernelCase
from mha.conformance.embedded.probes import filled_memory, same_bits
from mha.conformance.embedded.trial import Trial
from mha.conformance.embedded.verdict import OutputVerdict

# So many calls get new numbers in the same memory: a cache that waits for a dozen calls is caught.
CALLS_IN_SAME_MEMORY = 14
# After so many more calls, of which nothing is looked at, it gets new numbers for the last times.
CALLS_UNSEEN = 50
# Each of them has numbers of its own.
NEXT_SEED = 7919


def probe_calls(trial: Trial, case: KernelCase) -> None:
    """Call a kernel often, on one item of a case, and on others of its shape."""
    small = replace(case, B=1)
    trial.most_held += 1  # of this shape there are many calls, for which memory may be kept
    try:
        _repeat(trial, small)
        _with_filled_memory(trial, small)
        _in_same_memory(trial, small)
        if not trial.findings.decided:  # what is kept, or given back, is finite too
            _with_nan(trial, small)
    except NotExpressed:  # as where every call is causal, and the kernel has no flag for it
        return


def _repeat(trial: Trial, case: KernelCase) -> None:
    """Call twice on the same numbers: the bits should be equal."""
    built = trial.build(case)
    first = trial.call(case, built, trial.laid_out(case, built))
    second = trial.call(case, built, trial.laid_out(case, built))
    if first is None or second is None:
        return
    trial.findings.of("STA-3", case).examples += 1
    if not all(map(same_bits, first, second)):
        # Sums in another order are right too, so that it decides only where it is claimed.
        claimed = bool(getattr(trial.claims, "repeats", None))
        message = "two calls with the same inputs give different bits"
        trial.findings.fail("STA-3", case, message, decisive=claimed)


def _with_filled_memory(trial: Trial, case: KernelCase) -> None:
    """Call where all new memory holds NaN, so that what the call does not write shows."""
    built = trial.build(case)
    with filled_memory():
        results = trial.call(case, built, trial.laid_out(case, built))
    if results is None:
        return
    if any(bool(result.isnan().any()) for result in results):
        message = "the result has NaN where the call has not written its memory"
        trial.findings.fail(case.clause, case, message)


def _with_nan(trial: Trial, case: KernelCase) -> None:
    """Call with NaN in the first key, if every query may attend to it: all results must show it.

    Those of a query with this key only should, and need not.
    """
    hides_keys = case.mask != "none" or case.window is not None or case.chunk is not None
    if hides_keys or (case.causal and case.L > case.S):
        return
    built = trial.build(case)
    key = built.key.clone()
    key[:, :, 0] = math.nan
    built = replace(built, key=key)
    results = trial.call(case, built, trial.laid_out(case, built))
    if results is None:
        return
    trial.findings.of("MSK-13", case).examples += 1
    most_finite = _queries_of_one_key(case) * case.H * (case.d_v or case.d)
    if int(results[0].isfinite().sum()) > most_finite:
        message = "a key that every query may attend to is NaN, but some results are finite"
        trial.findings.fail("MSK-13", case, message)


def _queries_of_one_key(case: KernelCase) -> int:
    """Return how many queries of a case in which none is hidden may attend to one key only."""
    if case.S == 1:
        return case.L
    is_first_alone = case.alignment == "top_left" or case.L == case.S
    return int(case.causal and is_first_alone)


def _in_same_memory(trial: Trial, case: KernelCase) -> None:
    """Call on the same tensors with new numbers each time, a dozen times and more.

    Every second time they are written so that torch does not count it as a change, and every third
    time the call is causal, if it may be. After each causal call all numbers are new, and in the
    call after that only those of some rows, for what is cached by the numbers at the edges.
    """
    given: list[Tensor] = []
    before: BuiltCase | None = None
    results: list[Tensor] | None = []
    for number in range(CALLS_IN_SAME_MEMORY):
        other = _next_case(trial, case, number)
        built = trial.build(other)
        if before is not None and number % 3 == 1:
            built = _with_new_rows(before, built, other.seed)
        laid_out = trial.laid_out(other, built)
        if not given:
            given = laid_out
        if number == CALLS_IN_SAME_MEMORY - 2:
            trial.repeat(other, built, given, CALLS_UNSEEN)
        for tensor, numbers in zip(given, laid_out, strict=True):
            # `data` has a count of changes of its own.
            target = tensor if number % 2 else tensor.data
            target.copy_(numbers)
        before, earlier = built, results
        results = trial.call(other, built, given)
        if results is None:
            return
        trial.findings.of("STA-3", case).examples += 1
        verdict = trial.verdict(other, built, results, directed=False)
        if not verdict.ok:
            stale = Stale(other, built, earlier or [], number)
            _note_stale(trial, stale, verdict)
            return


def _next_case(trial: Trial, case: KernelCase, number: int) -> KernelCase:
    """Return a case with other numbers, causal every third time if it may be."""
    takes_both = trial.claims.causal is not None and not trial.claims.always_causal
    is_causal = case.causal or (takes_both and number % 3 == 2)
    return replace(case, seed=case.seed + NEXT_SEED * (number + 1), causal=is_causal)


def _with_new_rows(before: BuiltCase, built: BuiltCase, seed: int) -> BuiltCase:
    """Return the numbers of an earlier call, but half of the keys and values between the edges."""
    keys = before.key.shape[2]
    generator = torch.Generator().manual_seed(seed)
    is_new = torch.rand(keys, generator=generator) < 0.5
    is_new[0] = is_new[-1] = False
    is_new = is_new.view(-1, 1).to(before.key.device)
    return replace(
        built,
        query=before.query,
        key=torch.where(is_new, built.key, before.key),
        value=torch.where(is_new, built.value, before.value),
    )


@dataclass(frozen=True, eq=False)
class Stale:
    """A call in memory that was used before, whose result is wrong.

    earlier: the results of the call before.
    number: how many calls there were before.
    """

    case: KernelCase
    built: BuiltCase
    earlier: Sequence[Tensor]
    number: int


def _note_stale(trial: Trial, stale: Stale, wrong: OutputVerdict) -> None:
    """Note a wrong result in memory that was used before, unless it is wrong in any memory."""
    case, built = stale.case, stale.built
    fresh = trial.call(case, built, trial.laid_out(case, built))
    if fresh is None:
        return
    is_of_the_call_before = bool(stale.earlier) and same_bits(fresh[0], stale.earlier[0])
    is_known = is_of_the_call_before or trial.is_earlier(fresh)
    if is_known or trial.verdict(case, built, fresh).ok:
        message = f"call {stale.number + 1} on the same tensors with new numbers: {wrong.text}"
        trial.findings.fail("STA-3", case, message, "the result is one of earlier numbers")
    else:
        trial.findings.fail(case.clause, case, wrong.text, wrong.cause)
