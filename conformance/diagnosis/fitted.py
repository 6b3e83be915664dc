"""Defects with a number, such as a wrong scale: the number is fitted to what was returned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from mha.conformance.diagnosis.evidence import Evidence
from mha.conformance.diagnosis.fits import answer, difference
from mha.conformance.harness.known_bad.catalogue import (
    contexts_times,
    outputs_times,
    scale_of,
    scores_times,
    sums_times,
)
from mha.conformance.harness.known_bad.defect import Defect
from mha.spec import Claims

# The natural logarithms of factors of scores that are tried.
LEAST_LOG, MOST_LOG = -3.0, 3.0
# Points of the grid on which the least error is looked for, and steps towards it from there.
POINTS, STEPS = 61, 45


def fitted(evidence: Sequence[Sequence[Evidence]], claims: Claims) -> Iterator[Defect]:
    """Yield defects with a number that is fitted to the richest incorrect answer."""
    wrong: list[Evidence] = []
    for calls in evidence:
        wrong += [call for call in calls if bool(call.wrong.all()) and _is_finite(call)]
    if not wrong:
        return
    call = max(wrong, key=lambda call: call.output.numel())
    bias = call.weights.b_o
    shift = 0.0 if bias is None else bias.double().cpu()
    # Least squares: of the contexts, which the bias is added to, and of the whole output.
    actual, right = call.output - shift, call.right.mid - shift
    yield contexts_times(float((actual * right).sum() / right.square().sum()))
    yield outputs_times(float((call.output * call.right.mid).sum() / call.right.mid.square().sum()))

    def error(log: float) -> float:
        exact, _ = answer(scores_times(math.exp(log)), call, claims, {}, torch.float64)
        return difference(call.output, exact)

    factor = math.exp(_minimum(error, LEAST_LOG, MOST_LOG))
    yield scores_times(factor)
    yield sums_times(factor)
    yield scale_of(factor * call.step.problem.scale(claims))


def _is_finite(call: Evidence) -> bool:
    return bool(call.output.isfinite().all()) and bool(call.right.mid.isfinite().all())


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function is smallest: the best point of a grid, then golden sections."""
    step = (high - low) / (POINTS - 1)
    best = min((low + step * number for number in range(POINTS)), key=function)
    low, high, ratio = best - step, best + step, (math.sqrt(5) - 1) / 2
    for _ in range(STEPS):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if function(left) < function(right):
            high = right
        else:
            low = left
    return (low + high) / 2
