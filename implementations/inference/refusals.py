"""What is said about a class that could not be understood, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mha.implementations.adapters.construction import building_advice, read_from_module
from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.discovery.raised import Raised, main_one
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.declaration import declaration_advice
from mha.implementations.inference.nearest_projections import EachCallRaises, EquallyNear
from mha.implementations.inference.projections import Unclear, parameter_maps
from mha.implementations.inference.search import with_claims


def refusal(
    empty: Candidate, module: nn.Module, problems: Sequence[Unclear]
) -> ImplementationError:
    """Return why a module is not read, and what to do.

    problems: what each way of reading it leaves open.
    """
    label, problem = empty.label, problems[0]
    others = empty.signature.others
    offsets = ", ".join(name for name in others if name.startswith("cu_seqlens"))
    if offsets:
        return ImplementationError(
            f"{label} takes sequences packed one after another ({offsets}); judge a module of a"
            f" batch, (b, l, d), that packs its items, calls {label}, and unpacks the result"
        )
    constructor = empty.declared.constructor
    variables = ", ".join(read_from_module(constructor))
    if variables:
        advice = building_advice(label, constructor, empty.arguments)
        return ImplementationError(
            f"{label} reads {variables} from its module: {problem}; {advice}"
        )
    unknown = _unknown_inputs(empty)
    advice = f"{unknown}{_advice(empty, module, problem)}"
    if not isinstance(problem, EachCallRaises):
        return ImplementationError(f"{label} needs a declaration: {problem}{advice}")
    tries = [each.raised for each in problems if isinstance(each, EachCallRaises)]
    raised = main_one(tries)
    if raised.needs:
        return ImplementationError(f"{label} {raised.needs} (each call raises {raised})")
    said = calls_raise(raised, tries)
    if raised.place and not unknown and not raised.is_of_none:
        # No declaration changes the code that is called.
        return ImplementationError(f"{label} cannot be judged: {said}")
    return ImplementationError(f"{label} needs a declaration: {said}{advice}")


def calls_raise(raised: Raised, tries: Sequence[Sequence[Raised]]) -> str:
    """Return what calls raise: what most of them do, and another exception of the usual layout.

    An error of the code itself explains the others.
    """
    others = []
    for first, *_ in tries:
        if (first.kind, first.place) != (raised.kind, raised.place):
            others.append(first)
    if not others:
        return f"each call raises {raised}"
    if raised.is_of_code:
        return f"calls raise {raised}"
    return f"calls raise {raised}; in other dtypes, or with other lengths, {others[0]}"


def _unknown_inputs(empty: Candidate) -> str:
    """Return a remark on what `forward` requires that has no known name."""
    unknown = empty.declared.unknown_inputs
    if not unknown:
        return ""
    advice = "of no known meaning, and was given None; pass call=... that gives something else"
    return f"; forward also requires {', '.join(unknown)}, {advice}"


def _both_answers(problem: Unclear) -> str:
    """Return the declarations of two readings that are equally near, with their masks and claims.

    It is "" where one of them leaves something else open.
    """
    if not isinstance(problem, EquallyNear):
        return ""
    answers = []
    for reading in problem.readings:
        try:
            found = with_claims(reading)
        except Unclear:
            return ""
        answers.append(found.declared.line(found.label))
    return f". Either: {' -- or: '.join(answers)}"


def _advice(empty: Candidate, module: nn.Module, problem: Unclear) -> str:
    """Return what to declare: one of two readings, if these are all that is left open."""
    answers = _both_answers(problem)
    if answers:
        return answers
    try:
        return declaration_advice(empty.label, parameter_maps(module, empty.config)[0])
    except Unclear:
        return declaration_advice(empty.label, {})
