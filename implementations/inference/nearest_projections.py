"""The reading of a module's projections, inputs and layout: the one that explains its outputs, or
else the nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from mha.implementations.discovery.raised import Raised
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.probes import (
    EQUAL_LENGTHS,
    NO_VALUES,
    QUICK_CASES,
    SPECIAL_CASES,
    WITHOUT_QUERIES,
    Formula,
    Probe,
    SpecialCase,
    changed,
    formulas,
    is_close,
)
from mha.implementations.inference.projections import Unclear
from mha.spec import Config, Output

Bias = Callable[[int, int], Tensor]  # of the scores, from L and S


class EachCallRaises(Unclear):
    """No trial run says what a module computes; raised: by the calls of each reading of it."""

    def __init__(self, message: str, raised: Iterable[Raised | None]) -> None:
        super().__init__(message)
        self.raised = [each for each in raised if each is not None]


def find_formula(candidate: Candidate, outputs: Iterable[Tensor] | None = None) -> bool:
    """Set the formula that gives the module's outputs on all probes, and return whether there is
    one.

    outputs: on the probes, if not those of plain calls.
    """
    found = formula_of(candidate, _outputs(candidate) if outputs is None else outputs)
    if found:
        candidate.formula, candidate.explained = found, True
    return found is not None


def formula_of(
    candidate: Candidate, outputs: Iterable[Tensor], bias: Bias | None = None
) -> Formula | None:
    """Return the first formula, with a bias of the scores, that gives the outputs on all probes, if
    there is one.
    """
    remaining, projected = iter(outputs), candidate.parameters.get("w_o") is not None
    probes, special, config = candidate.probes, candidate.special, candidate.config

    @cache  # a second output is asked for only where a formula gives the first
    def output_on(probe: Probe) -> Tensor | None:
        return next(remaining, None)

    def gives_outputs(formula: Formula) -> bool:
        return formula.projected == projected and all(
            is_close(output_on(probe), _expected(formula, probe, special, config, bias))
            for probe in probes
        )

    return next(filter(gives_outputs, formulas()), None)


@lru_cache(256)  # the choices of projections and layouts have the same probes
def _expected(
    formula: Formula, probe: Probe, special: SpecialCase, config: Config, bias: Bias | None
) -> Tensor:
    """Return the output that a formula gives on a probe."""
    mask = bias and bias(probe.queries, probe.inputs[1].shape[1])
    return formula(probe.inputs, special.weights_of(config), mask)


def outputs_of(candidate: Candidate, **options: Any) -> list[Tensor]:
    """Return the outputs on the probes, up to the first call with these options that does not
    return a tensor.
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
    """Return the one of several candidates, none of which explains the outputs, that explains most
    of them.

    candidates: the choices of projections, inputs and layout, the most likely first. Those are
    compared that can be called and return an output of the right shape, by the number of special
    cases that they explain.

    Raises Unclear if there is none, and if several are equally near.
    """
    compared = [
        Compared(each, explained_cases(each, QUICK_CASES)) for each in _callable(candidates)
    ]
    inputs = next(
        (each for each in compared if shows_inputs(each.quick)), compared[0]
    ).candidate.cross_attention
    compared = [each for each in compared if each.candidate.cross_attention == inputs]
    compared = _best(compared, lambda each: len(each.quick) + _keeps_items_apart(each.candidate))
    compared = [replace(each, cases=explained_cases(each.candidate)) for each in compared]
    if not any(each.quick or each.cases for each in compared):
        _require_named_inputs(candidates[0])
    return _understood(_only_one(_best(compared, lambda each: len(each.cases))))


def _best(compared: Sequence[Compared], score: Callable[[Compared], int]) -> list[Compared]:
    """Return those with the highest score."""
    scores = [score(each) for each in compared]
    return [each for each, own in zip(compared, scores, strict=True) if own == max(scores)]


def explained_cases(
    candidate: Candidate, among: Iterable[SpecialCase] = SPECIAL_CASES
) -> list[Candidate]:
    """Return a candidate for each of several special cases in which a formula gives the outputs."""
    tried = [replace(candidate, special=case, claims=dict(candidate.claims)) for case in among]
    return [each for each in tried if find_formula(each)]


def shows_inputs(cases: Iterable[Candidate]) -> bool:
    """Return whether the outputs in one of several explained cases depend on the values."""
    return any(each.special is not NO_VALUES for each in cases)


def _understood(chosen: Compared) -> Candidate:
    """Return a candidate as it is understood in the first of the special cases that it explains."""
    candidate, quick = chosen.candidate, chosen.quick
    for case in chosen.cases:
        return replace(case, shown=case.special.name)
    projected = candidate.parameters.get("w_o") is not None
    formula = Formula(causal="top_left" if _is_causal(candidate) else None, projected=projected)
    return replace(
        candidate, formula=formula, shown=quick[0].special.name if shows_inputs(quick) else ""
    )


def _is_causal(candidate: Candidate) -> bool:
    """Return whether the first query does not read the last key, but the last query the first one."""
    for probe in replace(candidate, special=EQUAL_LENGTHS).probes:
        read = influence(candidate, probe.inputs)
        if read is None or bool(read[:, 0, -1].any()) or not bool(read[:, -1, 0].all()):
            return False
    return True


def influence(candidate: Candidate, inputs: tuple[Tensor, ...], **options: Any) -> Tensor | None:
    """Return how much each output changes with each key and value, (B, L, S), whatever the query; 0
    for rounding.

    options: of the calls. None if one of them raises.
    """
    tried = replace(candidate, special=WITHOUT_QUERIES)
    query, key, _ = inputs
    base, columns = tried.call(inputs, **options), []
    for position in range(key.shape[1]):
        step = torch.zeros_like(key)
        step[:, position] = 1.0
        shifted = {
            id(x): x + step for x in (inputs[1:] if tried.cross_attention else inputs)
        }  # one tensor stays one
        after = tried.call(tuple(shifted.get(id(x), x) for x in inputs), **options)
        if not (_is_output(base, query) and _is_output(after, query)):
            return None
        x, y = base.output, after.output  # type: ignore[union-attr]  # both are outputs
        columns.append((x - y).nan_to_num().abs().where(changed(x, y), 0.0).amax(-1))
    return torch.stack(columns, -1)


def agree(result: Output | None, other: Output | None) -> bool:
    """Return whether two calls return the same output, NaN included."""
    if (
        result is None
        or other is None
        or not (isinstance(result.output, Tensor) and isinstance(other.output, Tensor))
    ):
        return False
    return (
        result.output.shape == other.output.shape and not changed(result.output, other.output).any()
    )


def _is_output(result: Output | None, query: Tensor) -> bool:
    return (
        result is not None
        and isinstance(result.output, Tensor)
        and result.output.shape == query.shape
    )


def returns_outputs(candidate: Candidate) -> bool:
    """Return whether calls return an output of the right shape."""
    return all(
        _is_output(candidate.call(probe.inputs), probe.inputs[0]) for probe in candidate.probes
    )


def _keeps_items_apart(candidate: Candidate) -> bool:
    """Return whether no item of a batch depends on another one, as it does with the axes in another
    order.
    """
    probe = candidate.probes[0]
    inputs = probe.inputs
    shifted = {
        id(x): torch.cat([x[:1] + 1.0, x[1:]]) for x in inputs
    }  # one tensor stays one tensor
    before, after = candidate.call(inputs), candidate.call(tuple(shifted[id(x)] for x in inputs))
    return (
        before is not None
        and after is not None
        and not changed(before.output[1:], after.output[1:]).any()
    )


def _only_one(best: Sequence[Compared]) -> Compared:
    """Return the one of the nearest candidates whose layouts agree most; raise Unclear if several
    do.
    """
    first, *rest = _best(best, lambda each: -_layouts(each.candidate))
    others = [
        each.candidate for each in rest if _reading(each.candidate) != _reading(first.candidate)
    ]
    if others:
        readings = " or ".join(_shown(each) for each in (first.candidate, others[0]))
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise Unclear(
            f"no reading gives what it computes, and several are equally near: {readings}{more}"
        )
    return first


def _layouts(candidate: Candidate) -> int:
    """Return the number of different layouts of its matrices."""
    paths = [path for key, path in candidate.parameters.items() if key.startswith("w_")]
    return len({"" if isinstance(path, str) else path[1] for path in paths if path is not None})


def _reading(candidate: Candidate) -> object:
    """Return what tells candidates apart, except for the name of W_o where none explains the
    outputs.
    """
    parameters = {key: path for key, path in candidate.parameters.items() if key != "w_o"}
    return parameters, candidate.layout, candidate.cross_attention


def _shown(candidate: Candidate) -> str:
    layout = f", layout={candidate.layout!r}" if candidate.layout != "b l d" else ""
    return f"from_module({candidate.label}, parameters={candidate.parameters}{layout})"


def _callable(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that return an output of the right shape, or else the first one that
    returns a tensor.

    Raises Unclear if each call raises, or none returns a tensor.
    """
    working = [candidate for candidate in candidates if not candidate.problem]
    if not working:
        _require_named_inputs(candidates[0])
        message = f"each call raises, the first one {candidates[0].problem}"
        raise EachCallRaises(message, [each.raised for each in candidates])
    returning = [each for each in working if outputs_of(each)]
    if not returning:
        _require_output(working[0])
    fitting = [each for each in returning if returns_outputs(each)]
    if not fitting:
        _require_query_first(returning[0])
    return fitting or returning[:1]


def _require_query_first(candidate: Candidate) -> None:
    """Raise Unclear if the output is as long as what is taken for the memory."""
    memory = candidate.signature.memory if candidate.cross_attention == "memory" else None
    shapes = [output.shape for output in outputs_of(candidate)]
    if memory and shapes == [probe.inputs[1].shape for probe in candidate.probes]:
        raise Unclear(
            f"its output is as long as {memory}, which is then the query, and not key and value;"
            " pass call=..."
        )


def _require_named_inputs(candidate: Candidate) -> None:
    """Raise Unclear if nothing says which of three inputs is the query."""
    if candidate.cross_attention is True and not candidate.signature.inputs:
        raise Unclear(
            f"forward({', '.join(candidate.forward_parameters)}) does not name its inputs, and its"
            " output matches no formula if they are query, key and value; pass call=..."
        )


def _require_output(candidate: Candidate) -> None:
    """Raise Unclear for a module that does not return a tensor, alone or first in a tuple."""
    result = candidate.call(candidate.probes[0].inputs)
    returned = result.output if result else None
    length = f" of {len(returned)}" if isinstance(returned, tuple) else ""
    reason = candidate.problem or f"it returns {type(returned).__name__}{length}"
    raise Unclear(f"its output was not found ({reason}); pass call=... that returns the output")
