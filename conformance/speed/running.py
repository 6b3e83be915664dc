"""The work done: by an implementation, on inputs that change under the same addresses, and by the plain formula."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mha.conformance.expect import expect_no_worse
from mha.conformance.guard import guarded
from mha.conformance.properties.accuracy import plain_formula
from mha.conformance.properties.changes import select_queries
from mha.conformance.speed.steps import Results, decoding, nothing, peak_memory, stepping
from mha.conformance.speed.work import Work
from mha.conformance.violation import Violation
from mha.spec import Implementation, Problem

# The lengths whose product may take more memory than there is, and the share of all that one call may take.
LARGE, SHARE = 1 << 25, 0.8


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
        upstream = torch.zeros_like(first.query)
        upstream[:, work.rows] = 1

        def call(inputs: Problem) -> Tensor:
            with guarded("call"):
                options = {"mask": inputs.mask, "is_causal": inputs.is_causal}
                output: Tensor = attention(inputs.query, inputs.key, inputs.value, **options).output
            return output

        clear = getattr(attention, "zero_grad", nothing)
        self.leaves, step = stepping(call, own, upstream, training=work.training, clear=clear)
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
    """What the plain formula gives in float64 and in the dtype, for each seed and the rows of the work."""

    def __init__(self, work: Work, problems: list[Problem]) -> None:
        self.rows, self.found = work.rows, []

        def formula(inputs: Problem) -> Tensor:
            chosen = select_queries(inputs, work.rows, "top_left")
            return plain_formula(chosen, chosen.allowed(None))

        for problem in problems:
            wide = problem.map_inputs(torch.Tensor.double)
            wide = wide.change(weights=problem.weights.to(torch.float64, work.case.device))
            right, near = (
                stepping(formula, each, torch.ones_like(each.query[:, work.rows]), training=work.training)[1]()
                for each in (wide, problem)
            )
            self.found.append({name: (value, near[name]) for name, value in right.items()})

    def expect(self, seen: Results, place: int) -> None:
        """Raise a Violation unless the error is at most twice that of the plain formula in the same dtype (NUM-3)."""
        for name, (right, plain) in self.found[place].items():
            got = seen.get(name, torch.full_like(plain, torch.nan))
            try:
                expect_no_worse(name, got[:, self.rows] if name == "output" else got, plain, right)
            except Violation as violation:
                raise Violation(f"{violation.message}: what would be timed is wrong") from None


def unaffordable(implementation: Implementation, work: Work) -> str:
    """Return why a work takes more memory than there is, going by an eighth of its length; "" if it does not."""
    if work.case.L * work.case.S < LARGE:
        return ""
    short = replace(work, case=replace(work.case, L=work.case.L // 8, S=work.case.S // 8))
    try:
        needed = 8**2 * peak_memory(Runner(implementation, short, short.problems()).run, work.case.device)
    except Violation:  # which the whole length will show
        return ""
    there = _memory(work.case.device)
    if needed <= SHARE * there:
        return ""
    return f"it would take about {needed / 2**30:.0f} GiB, and this machine has {there / 2**30:.0f}"


def _memory(device: str) -> float:
    """Return the bytes that there are, infinity where nobody tells."""
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[1])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if hasattr(os, "sysconf") else float("inf")
