"""What is timed: a call of an attention on inputs that change under the same addresses, and what it must compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.expect import expect_no_worse
from mha.conformance.guard import guarded
from mha.conformance.properties.accuracy import plain_formula
from mha.conformance.speed.steps import Results, decoding, nothing, stepping
from mha.conformance.violation import Violation
from mha.spec import Claims, Implementation, Problem

SHAPES: dict[str, dict[str, Any]] = {
    "encoder": {"B": 8, "n_heads": 8, "head_dim": 64, "L": 128, "S": 128, "mask": "padding", "inputs": "self"},
    "long": {"B": 1, "n_heads": 8, "head_dim": 64, "L": 2048, "S": 2048, "causal": True, "inputs": "self"},
    # The last of 1024 tokens: `decode` on the cache of those before, or one query against all of them.
    "token": {"B": 8, "n_heads": 8, "head_dim": 64, "L": 1, "S": 1024, "inputs": "memory"},
}
# Inputs of two seeds take turns, so that what is cached by address is wrong every other time.
SEEDS = (0, 1)


@dataclass(frozen=True)
class Work:
    """One thing to do: a case, in inference or in training (with the backward pass)."""

    name: str
    case: Case
    training: bool

    @property
    def title(self) -> str:
        """What it is, in words."""
        steps = "training" if self.training else "inference"
        return f"{self.name}, {steps}, {self.case.dtype} on {self.case.device}"

    def unclaimed(self, claims: Claims) -> str:
        """Return what of it is not claimed, if anything."""
        case = self.case
        if case.dtype not in claims.dtypes or case.device not in claims.devices:
            return f"{case.dtype} on {case.device} is not claimed"
        missing = {
            "cross_attention": case.inputs != "self" and not claims.cross_attention,
            "masks": case.mask != "none" and "bool" not in claims.masks,
            "causal": case.causal and claims.causal is None,
            "gradients": self.training and not claims.gradients,
        }
        return next((f"it does not claim {claim}" for claim, is_missing in missing.items() if is_missing), "")

    @property
    def decodes(self) -> bool:
        """Whether it is one token against a cache, where an implementation has one."""
        return self.case.L == 1

    @property
    def operations(self) -> float:
        """The floating-point operations of its matrix products, of what is needed alone; decoding has a cache."""
        case, width = self.case, self.case.n_heads * self.case.head_dim
        rows = case.B * (2 * case.L + 2 * (1 if self.decodes else case.S))
        pairs = case.B * case.n_heads * case.L * case.S * (0.5 if case.causal else 1.0)
        return (2.0 * rows * width**2 + 4.0 * pairs * case.head_dim) * (3 if self.training else 1)

    @property
    def bytes_moved(self) -> int:
        """The bytes of inputs, weights and output, each once: the least that is moved."""
        case, width = self.case, self.case.n_heads * self.case.head_dim
        tensors = {"self": 1, "memory": 2}.get(case.inputs, 3)
        numbers = case.B * width * (case.L * 2 + (tensors - 1) * case.S) + 4 * width**2
        return numbers * int(torch.finfo(getattr(torch, case.dtype)).bits // 8)

    def problems(self) -> list[Problem]:
        """Return a problem for each seed, with the same weights."""
        first, second = (Case(**vars(self.case) | {"seed": seed}).problem() for seed in SEEDS)
        return [first, second.change(weights=first.weights)]


class Runner:
    """One implementation at one work: `load` puts in the inputs of a seed, `run` is what is timed."""

    def __init__(self, implementation: Implementation, work: Work, problems: list[Problem]) -> None:
        first = problems[0]
        attention: Any = implementation.build(
            first.config, first.weights, dtype=first.query.dtype, device=work.case.device
        )
        _ = attention.train() if work.training else attention.eval()
        self.problems, self.place = problems, 0
        self.runs: list[Callable[[], Results]] = []
        if work.decodes and implementation.claims.decodes:
            self.runs = [decoding(attention, problem) for problem in problems]
            return
        own = first.change(mask=None if first.mask is None else first.mask.clone())

        def call(inputs: Problem) -> Tensor:
            with guarded("call"):
                options = {"mask": inputs.mask, "is_causal": inputs.is_causal}
                output: Tensor = attention(inputs.query, inputs.key, inputs.value, **options).output
            return output

        clear = getattr(attention, "zero_grad", nothing)
        self.leaves, step = stepping(call, own, training=work.training, clear=clear)
        self.runs = [step] * len(problems)

    def load(self, place: int) -> None:
        """Put in the inputs of a seed, where those before were."""
        self.place = place
        if self.runs[0] is not self.runs[1]:
            return
        with torch.no_grad():
            for name in ("query", "key", "value", "mask"):
                mine, given = getattr(self.leaves, name), getattr(self.problems[place], name)
                if mine is not None:
                    mine.copy_(given)

    def run(self) -> Results:
        """Do the work once."""
        return self.runs[self.place]()


class Reference:
    """What the plain formula gives in float64 and in the dtype, for each seed."""

    def __init__(self, work: Work, problems: list[Problem]) -> None:
        self.found = []
        for problem in problems:
            allowed = problem.allowed("top_left")
            wide = problem.map_inputs(torch.Tensor.double)
            wide = wide.change(weights=problem.weights.to(torch.float64, work.case.device))

            def formula(inputs: Problem, allowed: Tensor = allowed) -> Tensor:
                return plain_formula(inputs, allowed)

            right = stepping(formula, wide, training=work.training)[1]()
            near = stepping(formula, problem, training=work.training)[1]()
            self.found.append({name: (value, near[name]) for name, value in right.items()})

    def expect(self, seen: Results, place: int) -> None:
        """Raise a Violation unless the error is at most twice that of the plain formula in the same dtype (NUM-3)."""
        for name, (right, plain) in self.found[place].items():
            try:
                expect_no_worse(name, seen.get(name, torch.full_like(plain, torch.nan)), plain, right)
            except Violation as violation:
                raise Violation(f"{violation.message}: what would be timed is wrong") from None
