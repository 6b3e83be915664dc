"""The diagnosis where outputs are right: which gradients are missing, or a multiple of what they
should be.

This is seen, not guessed: the same gradients must be so in the failing case and in cases of other
sizes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.claimed import fit_sizes
from mha.conformance.diagnosis.evidence import NAMES, related_cases
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
    """The gradients of a case: the names of those that are known, and by which factor each wrong
    one is wrong.

    A factor is NaN where the gradient is no multiple of the right one.
    """

    names: set[str]
    wrong: dict[str, float]


def wrong_gradients(prop: Property, session: Session) -> str:
    """Return in words which gradients are incorrect in a failing session, or "" if they are not so
    in a simple way.
    """
    cases = (session.case, *related_cases(prop, session.case))
    try:
        with preserved():
            first, *rest = (_gradients(session.implementation, case) for case in cases)
    except Exception:  # of the implementation, or of a case of other sizes that it does not take
        return ""
    wrong = {name: factor for each in rest for name, factor in each.wrong.items()}
    if not first.wrong or not first.wrong.keys() <= wrong.keys() or not _are_alike(first, *rest):
        return ""
    text = _text(
        list(wrong), next(iter(wrong.values())), set().union(*(each.names for each in rest))
    )
    always = all(each.names & wrong.keys() <= each.wrong.keys() for each in rest)
    return text if always else f"{text}, in calls like this one"


def _are_alike(*found: Gradients) -> bool:
    """Return whether all that is wrong is wrong by the same factor."""
    factors = [factor for each in found for factor in each.wrong.values()]
    return all(abs(factor - factors[0]) <= SAME for factor in factors)


def _gradients(implementation: Implementation, case: Case) -> Gradients:
    """Compare the gradients of a case."""
    sizes: dict[str, Any] = fit_sizes(
        {name: getattr(case, name) for name in NAMES}, implementation.claims
    )
    session = Session(implementation, replace(case, **sizes))
    problem = session.case.problem()
    upstream = session.upstream(problem)
    reported, expected = (
        session.gradients(problem, upstream),
        session.expected_gradients(problem, upstream),
    )
    known = {
        name for name, ball in expected.items() if bool((ball.mid.abs() > ball.rad).any())
    } & reported.keys()
    factors = {
        name: _factor(reported[name].tensor, expected[name]) for name in reported if name in known
    }
    wrong = {name: factor for name, factor in factors.items() if factor != 1.0}
    for name in (
        _summed(problem) & wrong.keys()
    ):  # whose parts the weights tell apart, unless there is none
        if not abs(wrong[name]) <= SAME:
            del wrong[name]
    return Gradients(known, wrong)


def _summed(problem: Problem) -> set[str]:
    """Return the names of inputs that are one tensor, whose gradient is a sum."""
    return {
        name
        for name in INPUTS
        if sum(getattr(problem, name) is getattr(problem, other) for other in INPUTS) > 1
    }


def _factor(actual: Tensor, expected: Ball) -> float:
    """Return how many times the expected gradient the actual one is: 1 within the bound, NaN if it
    is no multiple.
    """
    alike = max(ALIKE, ROUNDINGS * torch.finfo(actual.dtype).eps)
    right, radius, actual = expected.mid, expected.rad, actual.double()
    if bool(((actual - right).abs() <= radius).logical_or(radius.isinf()).all()):
        return 1.0
    factor = float((actual * right).sum() / right.square().sum())
    return (
        factor
        if float((actual - factor * right).norm()) <= alike * float(right.norm())
        else math.nan
    )


def _text(wrong: Sequence[str], factor: float, every: Collection[str]) -> str:
    if len(wrong) == len(every):
        is_zero = "no gradient reaches any input or weight"
        return (
            is_zero
            if abs(factor) <= SAME
            else f"all gradients are {factor:.4g} times what they should be"
        )
    *most, last = [f"the {name}" if name in (*INPUTS, "mask") else name for name in wrong]
    names = f"{', '.join(most)} and {last}" if most else last
    is_zero = f"no gradient reaches {names}"
    return (
        is_zero
        if abs(factor) <= SAME
        else f"the gradient of {names} is {factor:.4g} times what it should be"
    )
