"""The work done: by an implementation, on inputs that change under the same addresses, and by the plain formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mha.conformance.benchmarks.memory import memory_limit, peak_memory
from mha.conformance.benchmarks.workloads import Work
from mha.conformance.cases.reference import plain_formula
from mha.conformance.cases.transforms import select_queries
from mha.conformance.harness.assertions import expect_no_worse
from mha.conformance.harness.errors import Violation
from mha.conformance.harness.isolation import guarded, require_plain
from mha.spec import Implementation, Problem
from mha.spec.problem import INPUTS

Results = dict[str, Tensor]
# Scores that the plain formula holds at once.
CHUNK = 1 << 24
# The lengths whose product may take more memory than there is, and the share of it that a call may take.
LARGE, SHARE = 1 << 24, 0.8


class Runner:
    """One implementation at one work: `load` puts in the inputs of a seed, `run` is what is timed."""

    def __init__(self, implementation: Implementation, work: Work, problems: list[Problem]) -> None:
        first = problems[0]
        self.attention: Any = implementation.build(
            first.config, first.weights, dtype=first.query.dtype, device=work.case.device
        )
        _ = self.attention.train() if work.training else self.attention.eval()
        self.work, self.problems, self.place = work, problems, 0
        self.tells = work.training and implementation.claims.weight_gradients
        self.own = first.map_inputs(lambda x: x.detach().clone().requires_grad_(work.training))
        self.own = self.own.change(mask=None if first.mask is None else first.mask.clone())
        self.upstream = torch.ones_like(first.query)
        decodes = work.decodes and implementation.claims.decodes
        self.caches = [self._decoded(problem) for problem in problems] if decodes else []
        self.run: Callable[[], Results] = self._decode if decodes else self._call

    def load(self, place: int) -> None:
        """Put in the inputs of a seed, where those before were."""
        self.place = place
        with torch.no_grad():
            for name in (*INPUTS, "mask"):
                mine, given = getattr(self.own, name), getattr(self.problems[place], name)
                if mine is not None:
                    mine.copy_(given)
        _synchronize(self.work)

    def seen(self, results: Results) -> Results:
        """Return results of `run` with the gradients of the weights, where these are told."""
        if not self.tells:
            return results
        with guarded("weight_gradients()"):
            return results | {f"{name}.grad": grad for name, grad in self.attention.weight_gradients().items()}

    def _call(self) -> Results:
        own, leaves = self.own, self.own.distinct()
        if self.work.training:  # so that no gradient is added to that of the call before
            getattr(self.attention, "zero_grad", int)()
            for leaf in leaves.values():
                leaf.grad = None
        with torch.set_grad_enabled(self.work.training), guarded("call"):
            output = self.attention(own.query, own.key, own.value, mask=own.mask, is_causal=own.is_causal).output
            if self.work.training:
                output.backward(self.upstream)
        _synchronize(self.work)
        gradients = {f"{name}.grad": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        return {"output": output.detach(), **gradients}

    def _decode(self) -> Results:
        last = self.own.key.shape[1] - 1
        with torch.no_grad(), guarded("decode"):
            key, value = self.own.key[:, last:], self.own.value[:, last:]
            output = self.attention.decode(self.own.query, key, value, self.caches[self.place])[0]
        _synchronize(self.work)
        return {"output": output}

    def _decoded(self, problem: Problem) -> Any:
        """Return the cache of all tokens but the last."""
        cache = None
        for place in range(problem.shape[3] - 1):
            key, value = problem.key[:, place : place + 1], problem.value[:, place : place + 1]
            with torch.no_grad(), guarded("decode"):
                cache = self.attention.decode(key, key, value, cache)[1]
        return cache


class Reference:
    """What the plain formula gives in float64 and in the dtype, for each seed."""

    def __init__(self, work: Work, problems: list[Problem]) -> None:
        self.found = []
        for problem in problems:
            wide = problem.map_inputs(torch.Tensor.double)
            right = plainly(wide.change(weights=problem.weights.to(torch.float64, work.case.device)), work.training)
            near = plainly(problem, work.training)
            self.found.append({name: (value, near[name]) for name, value in right.items()})

    def expect(self, seen: Results, place: int) -> None:
        """Raise a Violation unless the error is at most twice that of the plain formula in the same dtype (NUM-3).

        Gradients of weights are only compared where they are told.
        """
        output = self.found[place]["output"][1]
        require_plain("output", seen["output"], [output.dtype], output.device, output.shape)
        for name, (right, plain) in self.found[place].items():
            if name in seen or not name.startswith("w_"):
                try:
                    expect_no_worse(name, seen.get(name, torch.full_like(plain, torch.nan)), plain, right)
                except Violation as violation:
                    raise Violation(f"{violation.message}: what would be timed is wrong") from None


def plainly(problem: Problem, training: bool) -> Results:
    """Return the output of the plain formula and the gradients of its sum, some queries at a time.

    Only of the weights' matrices: the root mean square of the few numbers of a bias is a matter of luck.
    """
    leaves = problem.map_inputs(lambda x: x.detach().clone().requires_grad_(training))
    matrices = {n: x.detach().clone().requires_grad_(training) for n, x in problem.weights.named() if x.ndim > 1}
    leaves, named = leaves.change(**matrices), leaves.distinct() | matrices
    sums = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in named.items()}
    batch, heads, queries, keys = problem.shape
    outputs = []
    for rows in torch.arange(queries).split(max(1, CHUNK // (batch * heads * keys))):
        with torch.set_grad_enabled(training):
            chosen = select_queries(leaves, rows, "top_left")
            output = plain_formula(chosen, chosen.allowed(None))
        outputs.append(output.detach())
        if training:
            found = torch.autograd.grad(output, list(named.values()), torch.ones_like(output))
            for name, gradient in zip(named, found, strict=True):
                sums[name] += gradient
    gradients = {f"{name}.grad": total.to(problem.query.dtype) for name, total in sums.items()} if training else {}
    return {"output": torch.cat(outputs, 1), **gradients}


def unaffordable(implementation: Implementation, work: Work) -> str:
    """Return why a work takes more memory than there is, going by much shorter ones; "" if it does not."""
    if work.case.L * work.case.S < LARGE:
        return ""

    def peak(part: int) -> int:
        short = replace(work, case=replace(work.case, L=work.case.L // part, S=work.case.S // part))
        runner = Runner(implementation, short, short.problems())
        runner.run()
        return peak_memory(runner.run, work.case.device)

    try:
        eighth, sixteenth = peak(8), peak(16)
    except Violation:  # which the whole length will show
        return ""
    # One part grows with the square of the length, the rest with the length.
    square = max(0, 128 * (eighth - 2 * sixteenth))
    needed, there = square + 8 * max(0.0, eighth - square / 64), memory_limit(work.case.device)
    if needed <= SHARE * there:
        return ""
    return f"it would take about {needed / 2**30:.0f} GiB, and there are {there / 2**30:.0f}"


def _synchronize(work: Work) -> None:
    if work.case.device == "cuda":
        torch.cuda.synchronize()
