"""The diagnosis where outputs are right: which gradients are missing, or off by a factor.

This is seen, not guessed: the same gradients must be so in the failing case and in cases of other
sizes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.claimed import fit_sizes
from mha.conformance.diagnosis.evidence import related_cases, sizes_of
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import Property
from mha.implementations.process.torch_state import preserved
from mha.spec import Implementation, Problem
from mha.spec.bounds import Ball
from mha.spec.problem import INPUTS

# By how much a gradient may differ from a multiple of the right one, as a share of it, or in
# roundings of the dtype.
ALIKE, ROUNDINGS = 1e-4, 8
# By how much factors may differ that are one.
SAME = 2e-3


@dataclass(frozen=True)
class Gradients:
    """The gradients of a case.

    names: of those that are known.
    wrong: the factor by which each wrong is off by, NaN where it is no multiple of the right one.
    """

    names: set[str]
    wrong: dict[str, float]


def wrong_gradients(prop: Property, session: Session) -> str:
    """Return in words which gradients of a session are incorrect, or "" if in no simple way."""
    cases = (session.case, *related_cases(prop, session.case))
    try:
        with preserved():
            first, *rest = (_gradients(session.implementation, case) for case in cases)
    except Exception:  # of the implementation, or of a case of other sizes that it does not take
        return ""
    wrong: dict[str, float] = {}
    known: set[str] = set()
    for each in rest:
        wrong |= each.wrong
        known |= each.names
    if not first.wrong or not first.wrong.keys() <= wrong.keys() or not _are_alike(first, *rest):
        return ""
    text = _text(list(wrong), next(iter(wrong.values())), known)
    always = all(each.names & wrong.keys() <= each.wrong.keys() for each in rest)
    return text if always else f"{text}, in calls like this one"


def _are_alike(*found: Gradients) -> bool:
    """Return whether all that is wrong is wrong by the same factor."""
    factors: list[float] = []
    for each in found:
        factors += each.wrong.values()
    return all(abs(factor - factors[0]) <= SAME for factor in factors)


def _gradients(implementation: Implementation, case: Case) -> Gradients:
    """Compare the gradients of a case."""
    sizes: dict[str, Any] = fit_sizes(sizes_of(case), implementation.claims)
    session = Session(implementation, replace(case, **sizes))
    problem = session.case.problem()
    upstream = session.upstream(problem)
    reported = session.gradients(problem, upstream)
    expected = session.expected_gradients(problem, upstream)
    known, wrong = set[str](), dict[str, float]()
    for name, gradient in reported.items():
        ball = expected.get(name)
        if ball is None or not bool((ball.mid.abs() > ball.rad).any()):
            continue
        known.add(name)
        factor = _factor(gradient.tensor, ball)
        if factor != 1.0:
            wrong[name] = factor
    # The weights tell the parts of a sum apart, unless there is none.
    for name in _summed(problem) & wrong.keys():
        if not abs(wrong[name]) <= SAME:
            del wrong[name]
    return Gradients(known, wrong)


def _summed(problem: Problem) -> set[str]:
    """Return the names of inputs that are one tensor, whose gradient is a sum."""
    places = Counter(id(getattr(problem, name)) for name in INPUTS)
    return {name for name in INPUTS if places[id(getattr(problem, name))] > 1}


def _factor(actual: Tensor, expected: Ball) -> float:
    """Return the multiple of the expected gradient that it is: 1 within the bound, NaN if none."""
    alike = max(ALIKE, ROUNDINGS * torch.finfo(actual.dtype).eps)
    right, radius, actual = expected.mid, expected.rad, actual.double()
    if bool(((actual - right).abs() <= radius).logical_or(radius.isinf()).all()):
        return 1.0
    factor = float((actual * right).sum() / right.square().sum())
    if float((actual - factor * right).norm()) <= alike * float(right.norm()):
        return factor
    return math.nan


def _text(wrong: Sequence[str], factor: float, every: Collection[str]) -> str:
    is_zero = abs(factor) <= SAME
    if len(wrong) == len(every):
        if is_zero:
            return "no gradient reaches any input or weight"
        return f"all gradients are {factor:.4g} times what they should be"
    words = []
    for name in wrong:
        words.append(f"the {name}" if name in (*INPUTS, "mask") else name)
    *most, last = words
    names = f"{', '.join(most)} and {last}" if most else last
    if is_zero:
        return f"no gradient reaches {names}"
    return f"the gradient of {names} is {factor:.4g} times what it should be"
