"""Which inputs require a gradient, where not all of them do (GRD-5)."""

from __future__ import annotations

from collections.abc import Sequence

from mha.conformance.cases.case import Case
from mha.spec import Problem
from mha.spec.problem import INPUTS


def differentiable(problem: Problem) -> list[str]:
    """Return the names of the inputs, and of an additive mask, first."""
    names = list(problem.distinct())
    if problem.mask is not None and problem.mask.is_floating_point():
        names.insert(0, "mask")
    return names


def subset(names: Sequence[str], number: int) -> list[str]:
    """Return the names whose places are the bits of a number that are set."""
    return [name for place, name in enumerate(names) if number >> place & 1]


def trained_beside_frozen_weights(case: Case, problem: Problem) -> Sequence[str]:
    """Return the names of what requires a gradient, which the seed of the case decides.

    Only some inputs, as in the tuning of a prompt that is key and value; or a learned bias, by
    itself or beside the inputs.
    """
    wanted: Sequence[str] = INPUTS
    if case.inputs == "cross":
        wanted = subset(INPUTS, case.seed % 7 + 1)
    elif case.inputs == "memory":
        wanted = INPUTS[case.seed % 2 :]
    if "mask" not in differentiable(problem):
        return wanted
    return ("mask", *wanted) if case.seed % 2 else ("mask",)
