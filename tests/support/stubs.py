"""Candidates whose calls are answered by a function, for finders: no module is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mha.implementations.discovery.raised import Raised
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.declared import DeclaredKernel
from mha.spec import Options, Output, Scores

# The output of a call with options, or None for a call that raises.
Answer = Callable[[Candidate, tuple[Tensor, Tensor, Tensor], dict[str, Any]], Tensor | None]


@dataclass(frozen=True)
class Stub(Candidate):
    """A candidate whose calls are answered by a function."""

    answer: Answer = lambda candidate, inputs, options: None

    def call(self, inputs: Any, **options: Any) -> Output | None:
        output = self.answer(self, inputs, options)
        if output is None:
            self.calls.raised = Raised("ValueError", "ValueError: refused", "", "")
            return None
        return Output(output, None)


def stub(kernel: Callable[..., Tensor], answer: Answer) -> Candidate:
    """Return a candidate for a kernel, with the contract's formula, as calls before have shown."""
    declared = DeclaredKernel(kernel, kernel.__name__, claims={"causal": None})
    return Stub(declared, explained=True, answer=answer)


def of_formula(candidate: Candidate, inputs: Any, options: Options, claimed: Scores) -> Tensor:
    """Return what the formula gives with the options of a call."""
    formula = replace(candidate.formula, options=options, claimed=claimed)
    return formula(inputs, candidate.weights, options.mask)
