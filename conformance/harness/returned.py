"""What a call returned, and whether it is as the contract describes it, whatever the clause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mha.conformance.harness.errors import Violation
from mha.conformance.harness.isolation import require_plain
from mha.conformance.harness.plain import viewed
from mha.conformance.harness.recording import CallStep, RecordedOutput, RecordedTensor
from mha.spec import Claims, Lse
from mha.spec.dtypes import traits_of

NoteMargin = Callable[[float], None]


class Returned(NamedTuple):
    """The parts of what a call returned, None where it has no such part.

    instead: in words, what it returned where it has no output.
    """

    output: Any
    weights: Any
    lse: Any
    instead: str

    @staticmethod
    def of(result: Any) -> Returned:
        """Return the parts of a result."""
        output = getattr(result, "output", None)
        instead = f"{result!r:.200}" if output is None else ""
        weights, lse = getattr(result, "weights", None), getattr(result, "lse", None)
        return Returned(output, weights, lse, instead)


def recorded(
    step: CallStep,
    returned: Returned,
    dtypes: tuple[torch.dtype, ...],
    claims: Claims,
    note_margin: NoteMargin,
) -> RecordedOutput:
    """Return what a call returned; raise a Violation unless shapes, dtypes and devices are right.

    dtypes: those that the output may have.
    """
    problem, number = step.problem, step.number
    if returned.output is None:
        assertion = f"assert isinstance(output_{number}, torch.Tensor)"
        message = f"the call returned {returned.instead}, but should return Output(output, weights)"
        raise Violation(message, (assertion,), family="SHP")
    name, device = f"output_{number}", problem.query.device
    require_plain(name, returned.output, dtypes, device, problem.output_shape)
    output = RecordedTensor(viewed(returned.output), name, note_margin)
    lse = None
    if problem.options.return_lse:
        lse = _recorded_lse(step, returned.lse, claims, note_margin)
    weights = None
    if step.need_weights and issubclass(type(returned.weights), Tensor):
        weights = _recorded_weights(step, returned.weights, dtypes, claims, note_margin)
    return RecordedOutput(output, weights, lse)


def _recorded_weights(
    step: CallStep,
    weights: Tensor,
    dtypes: tuple[torch.dtype, ...],
    claims: Claims,
    note_margin: NoteMargin,
) -> RecordedTensor:
    name, problem = f"weights_{step.number}", step.problem
    if claims.returns_weights:
        shape = (*problem.shape[:3], problem.shape[3] + problem.config.extra_keys)
        # A softmax in float32 may return its weights as they are, beside an output that is cast
        # back.
        wider = (torch.float32,) if traits_of(dtypes[0]).half else ()
        require_plain(name, weights, (*dtypes, *wider), problem.query.device, shape)
    return RecordedTensor(viewed(weights), name, note_margin)


def _recorded_lse(
    step: CallStep, lse: Any, claims: Claims, note_margin: NoteMargin
) -> RecordedTensor:
    name, problem, declared = f"lse_{step.number}", step.problem, claims.lse or Lse()
    if not issubclass(type(lse), Tensor):
        assertion = f"assert isinstance({name}, torch.Tensor)"
        message = "the call returned no log-sum-exp, though it was asked for"
        raise Violation(message, (assertion,), family="LSE")
    dtypes = declared.dtypes_for(problem.query.dtype)
    require_plain(name, lse, dtypes, problem.query.device, problem.shape[:3])
    return RecordedTensor(viewed(lse), name, note_margin)
