"""The reading of projections, inputs and layout that explains the outputs, or else the nearest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.probes import (
    EQUAL_LENGTHS,
    NO_VALUES,
    QUICK_CASES,
    SPECIAL_CASES,
    WITHOUT_QUERIES,
    Formula,
    Inputs,
    Probe,
    SpecialCase,
    changed,
    each_once,
    formulas,
    is_close,
)
from mha.implementations.inference.projections import Unclear
from mha.spec import Config, Output

Bias = Callable[[int, int], Tensor]  # of the scores, from L and S


class EachCallRaises(Unclear):
    """No trial run says what a module computes.

    raised: by the calls of each reading of it.
    """

    def __init__(self, message: str, readings: Iterable[Candidate]) -> None:
        super().__init__(message)
        self.raised = [each.calls.raised for each in readings if each.calls.raised]


class EquallyNear(Unclear):
    """Readings of which none is nearer to what a module computes than another.

    readings: the first two.
    """

    def __init__(self, message: str, readings: Sequence[Candidate]) -> None:
        super().__init__(message)
        self.readings = readings


def with_formula(candidate: Candidate, outputs: Iterable[Tensor] | None = None) -> Candidate | None:
    """Return the candidate with the formula that gives its outputs on all probes, if there is one.

    outputs: on the probes, if not those of plain calls.
    """
    if outputs is None:
        outputs = _outputs(candidate)
    found = formula_of(candidate, outputs)
    if found is None:
        return None
    return replace(candidate.trying(formula=found), explained=True)


def all_with_formula(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return those of several candidates whose outputs a formula gives, each with its formula."""
    return list(filter(None, map(with_formula, candidates)))


def code_of_each_raises(candidates: Iterable[Candidate]) -> bool:
    """Return whether the author's code raised for each candidate.

    It would with its weights in another order too, which have the same shapes.
    """
    raised = [each.calls.raised for each in candidates]
    return bool(raised) and all(error is not None and error.place for error in raised)


def formula_of(
    candidate: Candidate, outputs: Iterable[Tensor], bias: Bias | None = None
) -> Formula | None:
    """Return the first formula that gives the outputs on all probes, if there is one.

    bias: of the scores.
    """
    remaining, is_projected = iter(outputs), _is_projected(candidate)
    probes, special, config = candidate.probes, candidate.trial.special, candidate.config

    @cache  # a second output is asked for only where a formula gives the first
    def output_on(probe: Probe) -> Tensor | None:
        return next(remaining, None)

    def gives_outputs(formula: Formula) -> bool:
        for probe in probes:
            expected = _expected(formula, probe, special, config, bias)
            if not is_close(output_on(probe), expected):
                return False
        return True

    for usual in formulas():
        formula = replace(usual, n_heads=config.n_heads)
        if formula.projected == is_projected and gives_outputs(formula):
            return formula
    return None


def _is_projected(candidate: Candidate) -> bool:
    return candidate.declared.parameters.get("w_o") is not None


@lru_cache(256)  # the choices of projections and layouts have the same probes
def _expected(
    formula: Formula, probe: Probe, special: SpecialCase, config: Config, bias: Bias | None
) -> Tensor:
    """Return the output that a formula gives on a probe."""
    mask = bias and bias(probe.queries, probe.inputs[1].shape[1])
    return formula(probe.inputs, special.weights_of(config), mask)


def outputs_of(candidate: Candidate, **options: Any) -> list[Tensor]:
    """Return the outputs on the probes, up to the first call that does not return a tensor.

    options: of the calls.
    """
    return list(_outputs(candidate, **options))


def _outputs(candidate: Candidate, **options: Any) -> Iterator[Tensor]:
    for probe in candidate.probes:
        result = candidate.call(probe.inputs, **options)
        if result is None or not isinstance(result.output, Tensor):
            return
        yield result.output


@dataclass(frozen=True)
class Compared:
    """A candidate, and what it is for each special case in which a formula gives the outputs.

    quick, cases: those of `QUICK_CASES` and `SPECIAL_CASES`.
    """

    candidate: Candidate
    quick: list[Candidate]
    cases: list[Candidate] = field(default_factory=list)


def nearest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the one of several candidates, none of which explains the outputs, that explains most.

    candidates: the choices of projections, inputs and layout, the most likely first. Those are
        compared that can be called and return an output of the right shape, by the number of
        special cases that they explain.

    Raises Unclear if there is none, and if several are equally near.
    """
    working = _callable(candidates)
    compared = [Compared(each, explained_cases(each, QUICK_CASES)) for each in working]
    compared = _of_shown_inputs(compared)
    compared = _best(compared, lambda each: len(each.quick) + _keeps_items_apart(each.candidate))
    compared = [replace(each, cases=explained_cases(each.candidate)) for each in compared]
    best = _best(compared, lambda each: len(each.cases))
    if not best[0].cases and not any(each.quick for each in compared):
        _require_named_inputs(candidates[0])
    return _understood(_only_one(best))


def _of_shown_inputs(compared: Sequence[Compared]) -> list[Compared]:
    """Return those whose inputs are what the first one shows that explains a case with values."""
    inputs = compared[0].candidate.cross_attention
    for each in compared:
        if shows_inputs(each.quick):
            inputs = each.candidate.cross_attention
            break
    return [each for each in compared if each.candidate.cross_attention == inputs]


def _best(compared: Sequence[Compared], score: Callable[[Compared], int]) -> list[Compared]:
    """Return those with the highest score."""
    of_score: dict[int, list[Compared]] = {}
    for each in compared:
        of_score.setdefault(score(each), []).append(each)
    return of_score[max(of_score)]


def explained_cases(
    candidate: Candidate, among: Iterable[SpecialCase] = SPECIAL_CASES
) -> list[Candidate]:
    """Return a candidate for each of several special cases in which a formula gives the outputs."""
    return all_with_formula([candidate.trying(special=case) for case in among])


def shows_inputs(cases: Iterable[Candidate]) -> bool:
    """Return whether the outputs in one of several explained cases depend on the values."""
    return any(each.trial.special is not NO_VALUES for each in cases)


def _understood(chosen: Compared) -> Candidate:
    """Return a candidate as it is understood in the first of the special cases that it explains."""
    candidate, quick = chosen.candidate, chosen.quick
    if chosen.cases:
        case = chosen.cases[0]
        return replace(case, shown=case.trial.special.name)
    formula = Formula(projected=_is_projected(candidate))
    if _is_causal(candidate):
        formula = replace(formula, causal="top_left")
    shown = quick[0].trial.special.name if shows_inputs(quick) else ""
    return replace(candidate.trying(formula=formula), shown=shown)


def _is_causal(candidate: Candidate) -> bool:
    """Return whether the first query does not read the last key, and the last one the first."""
    for probe in candidate.trying(special=EQUAL_LENGTHS).probes:
        read = influence(candidate, probe.inputs)
        if read is None or bool(read[:, 0, -1].any()) or not bool(read[:, -1, 0].all()):
            return False
    return True


def influence(candidate: Candidate, inputs: Inputs, **options: Any) -> Tensor | None:
    """Return how much each output changes with each key and value, (B, L, S), whatever the query.

    0 stands for rounding, None for calls of which one raises.

    options: of the calls.
    """
    tried = candidate.trying(special=WITHOUT_QUERIES)
    query, key, _ = inputs
    base, columns = tried.call(inputs, **options), []
    for position in range(key.shape[1]):
        after = tried.call(_shifted(tried, inputs, position), **options)
        if not (is_output(base, query) and is_output(after, query)):
            return None
        x, y = base.output, after.output  # type: ignore[union-attr]  # both are outputs
        columns.append((x - y).nan_to_num().abs().where(changed(x, y), 0.0).amax(-1))
    return torch.stack(columns, -1)


def _shifted(candidate: Candidate, inputs: Inputs, position: int) -> Inputs:
    """Return inputs with another key and value at a position."""
    query, key, _ = inputs
    step = torch.zeros_like(key)
    step[:, position] = 1.0

    def shifted(x: Tensor) -> Tensor:
        return x if candidate.cross_attention and x is query else x + step

    return each_once(shifted, inputs)


def agree(result: Output | None, other: Output | None) -> bool:
    """Return whether two calls return the same output, NaN included."""
    if result is None or other is None or not isinstance(other.output, Tensor):
        return False
    return is_output(result, other.output) and not changed(result.output, other.output).any()


def is_output(result: Output | None, query: Tensor) -> bool:
    """Return whether a call returned a tensor of the shape of its query."""
    if result is None or not isinstance(result.output, Tensor):
        return False
    return result.output.shape == query.shape


def returns_outputs(candidate: Candidate) -> bool:
    """Return whether calls return an output of the right shape."""
    for probe in candidate.probes:
        if not is_output(candidate.call(probe.inputs), probe.inputs[0]):
            return False
    return True


def _keeps_items_apart(candidate: Candidate) -> bool:
    """Return whether no item depends on another one, as it does with the axes in another order."""
    inputs = candidate.probes[0].inputs
    shifted = each_once(lambda x: torch.cat([x[:1] + 1.0, x[1:]]), inputs)
    before, after = candidate.call(inputs), candidate.call(shifted)
    if before is None or after is None:
        return False
    return not changed(before.output[1:], after.output[1:]).any()


def _only_one(best: Sequence[Compared]) -> Compared:
    """Return the one of the nearest candidates whose layouts agree most.

    Raises Unclear if there are several.
    """
    first, *rest = _best(best, lambda each: -_layouts(each.candidate))
    reading = _reading(first.candidate)
    others = [each for each in rest if _reading(each.candidate) != reading]
    if not others:
        return first
    readings = f"{_shown(first.candidate)} or {_shown(others[0].candidate)}"
    if len(others) > 1:
        readings = f"{readings} and {len(others) - 1} more"
    message = f"no reading gives what it computes, and several are equally near: {readings}"
    raise EquallyNear(message, [_understood(first), _understood(others[0])])


def _layouts(candidate: Candidate) -> int:
    """Return the number of different layouts of its matrices."""
    layouts = set()
    for key, path in candidate.declared.parameters.items():
        if key.startswith("w_") and isinstance(path, str):
            layouts.add("")
        elif key.startswith("w_") and path is not None:
            layouts.add(path[1])
    return len(layouts)


def _reading(candidate: Candidate) -> object:
    """Return what tells candidates apart, without the name of W_o, which no output shows."""
    declared = candidate.declared
    return {**declared.parameters, "w_o": None}, declared.layout, declared.cross_attention


def _shown(candidate: Candidate) -> str:
    declared = candidate.declared
    arguments = f"{declared.label}, parameters={declared.parameters}"
    if declared.layout != "b l d":
        arguments += f", layout={declared.layout!r}"
    return f"from_module({arguments})"


def _callable(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that return an output of the right shape, or else the first tensor.

    Raises Unclear if each call raises, or none returns a tensor.
    """
    working = [candidate for candidate in candidates if not candidate.problem]
    if not working:
        _require_named_inputs(candidates[0])
        message = f"each call raises, the first one {candidates[0].problem}"
        raise EachCallRaises(message, candidates)
    returning = [each for each in working if outputs_of(each)]
    if not returning:
        _require_output(working[0])
    fitting = [each for each in returning if returns_outputs(each)]
    if not fitting:
        _require_query_first(returning[0])
    return fitting or returning[:1]


def _require_query_first(candidate: Candidate) -> None:
    """Raise Unclear if the output is as long as what is taken for the memory."""
    memory = candidate.signature.memory
    if candidate.cross_attention != "memory" or not memory:
        return
    outputs = outputs_of(candidate)
    shapes = [probe.inputs[1].shape for probe in candidate.probes]
    if [output.shape for output in outputs] == shapes:
        raise Unclear(
            f"its output is as long as {memory}, which is then the query, and not key and value;"
            " pass call=..."
        )


def _require_named_inputs(candidate: Candidate) -> None:
    """Raise Unclear if nothing says which of three inputs is the query."""
    if candidate.cross_attention is True and not candidate.signature.inputs:
        names = ", ".join(candidate.declared.forward_parameters)
        raise Unclear(
            f"forward({names}) does not name its inputs, and its"
            " output matches no formula if they are query, key and value; pass call=..."
        )


def _require_output(candidate: Candidate) -> None:
    """Raise Unclear for a module that does not return a tensor, alone or first in a tuple."""
    result = candidate.call(candidate.probes[0].inputs)
    returned: object = result.output if result else None
    reason = f"it returns {type(returned).__name__}"
    if isinstance(returned, tuple):
        reason = f"{reason} of {len(returned)}"
    reason = candidate.problem or reason
    raise Unclear(f"its output was not found ({reason}); pass call=... that returns the output")
