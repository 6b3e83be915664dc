"""A workload run by an implementation, and by the plain formula."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mha.conformance.benchmarks.workloads import Workload
from mha.conformance.cases.reference import plain_formula
from mha.conformance.cases.transforms import select_queries
from mha.conformance.harness.assertions import expect_no_worse
from mha.conformance.harness.errors import AdapterError, Violation
from mha.conformance.harness.isolation import guarded, require_plain
from mha.conformance.harness.memory import memory_limit, peak_memory
from mha.implementations.process.pristine import pristine
from mha.spec import Implementation, Problem, join_causal
from mha.spec.masks import window_mask
from mha.spec.problem import INPUTS

# The output and the gradients, by name: "output", "query.grad", "w_q.grad", ...
Results = dict[str, Tensor]
# The most scores that the plain formula holds at once.
CHUNK = 1 << 24
# How many times the error of the plain formula may be on a GPU, in float32 and in gradients of
# weights: correct kernels had 2.5 and 4.6 times.
GPU_TIMES = 10
# L * S from which on memory may run out, and the share of the memory that a call may take.
LARGE, SHARE = 1 << 24, 0.8


class Runner:
    """One implementation on one workload: `load` copies in the inputs of a seed, `run` is timed.

    The inputs change, but their addresses stay the same.

    problems: one for each seed. seed: the place of the one that is loaded.
    """

    def __init__(
        self, implementation: Implementation, workload: Workload, problems: list[Problem]
    ) -> None:
        first = problems[0]
        self.attention: Any = implementation.build(
            first.config, first.weights, dtype=first.query.dtype, device=workload.case.device
        )
        if workload.training:
            self.attention.train()
        else:
            self.attention.eval()
        self.workload, self.problems, self.seed = workload, problems, 0
        self.has_weight_gradients = workload.training and implementation.claims.weight_gradients
        self.inputs = first.map_inputs(
            lambda x: x.detach().clone().requires_grad_(workload.training)
        )
        self.inputs = self.inputs.change(mask=None if first.mask is None else first.mask.clone())
        self.upstream = torch.ones_like(first.query)
        decodes = workload.decodes and implementation.claims.decodes
        self.caches = [self._filled_cache(problem) for problem in problems] if decodes else []
        self.run: Callable[[], Results] = self._decode if decodes else self._call

    def load(self, seed: int) -> None:
        """Copy the inputs of a seed into the tensors that `run` uses."""
        self.seed = seed
        with torch.no_grad():
            for name in (*INPUTS, "mask"):
                target, source = getattr(self.inputs, name), getattr(self.problems[seed], name)
                if target is not None:
                    target.copy_(source)
        _synchronize(self.workload)

    def with_weight_gradients(self, results: Results) -> Results:
        """Return results of `run`, with the gradients of the weights if they are claimed."""
        if not self.has_weight_gradients:
            return results
        with guarded("weight_gradients()"):
            gradients = self.attention.weight_gradients().items()
            return results | {f"{name}.grad": gradient for name, gradient in gradients}

    def _call(self) -> Results:
        inputs, leaves = self.inputs, self.inputs.distinct()
        if self.workload.training:  # so that gradients do not add up from call to call
            getattr(self.attention, "zero_grad", int)()
            for leaf in leaves.values():
                leaf.grad = None
        with torch.set_grad_enabled(self.workload.training), guarded("call"):
            output = inputs.call(self.attention).output
            if self.workload.training:
                output.backward(self.upstream)
        _synchronize(self.workload)
        results = {"output": output.detach()}
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                results[f"{name}.grad"] = leaf.grad
        return results

    def _decode(self) -> Results:
        last = self.inputs.key.shape[1] - 1
        with torch.no_grad(), guarded("decode"):
            key, value = self.inputs.key[:, last:], self.inputs.value[:, last:]
            output = self.attention.decode(self.inputs.query, key, value, self.caches[self.seed])[0]
        _synchronize(self.workload)
        return {"output": output}

    def _filled_cache(self, problem: Problem) -> Any:
        """Return the cache that holds every token except the last."""
        cache = None
        for token in range(problem.shape[3] - 1):
            key, value = problem.key[:, token : token + 1], problem.value[:, token : token + 1]
            with torch.no_grad(), guarded("decode"):
                cache = self.attention.decode(key, key, value, cache)[1]
        return cache


class Reference:
    """The results of the plain formula for each seed, in float64 and in the workload's dtype."""

    def __init__(self, workload: Workload, problems: list[Problem]) -> None:
        self.expected: list[dict[str, tuple[Tensor, Tensor]]] = []
        with pristine(), warnings.catch_warnings():
            # On a GPU, the first backward pass warns that it creates a context.
            warnings.simplefilter("ignore")
            self._add(workload, problems)

    def _add(self, workload: Workload, problems: list[Problem]) -> None:
        for problem in problems:
            wide = problem.map_inputs(torch.Tensor.double)
            wide = wide.change(weights=problem.weights.to(torch.float64, workload.case.device))
            exact = plain_results(wide, workload.training)
            plain = plain_results(problem, workload.training)
            self.expected.append({name: (value, plain[name]) for name, value in exact.items()})

    def expect(self, results: Results, seed: int) -> None:
        """Raise a Violation unless the error is at most twice that of the plain formula (NUM-3).

        Errors are root mean squares. On a GPU it may be `GPU_TIMES` as much in float32, and in
        gradients of weights, in which errors that all queries share add up. Those are compared only
        if the results have them.
        """
        output = self.expected[seed]["output"][1]
        require_plain("output", results["output"], [output.dtype], output.device, output.shape)
        for name, (exact, plain) in self.expected[seed].items():
            is_weight = name.startswith("w_")
            if name in results or not is_weight:
                coarse = plain.is_cuda and (plain.dtype == torch.float32 or is_weight)
                times = GPU_TIMES if coarse else 2
                try:
                    with pristine():
                        result = results.get(name, torch.full_like(plain, torch.nan))
                        expect_no_worse(name, result, plain, exact, times)
                except Violation as violation:
                    raise Violation(f"its result is incorrect: {violation.message}") from None


def plain_results(problem: Problem, training: bool) -> Results:
    """Return the output of the plain formula and, in training, the gradients of its sum.

    Some queries are computed at a time. Gradients are of the inputs and the weight matrices: a bias
    has too few numbers for a stable root mean square.
    """

    def as_leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(training)

    leaves = _with_window_as_mask(problem).map_inputs(as_leaf)
    named = leaves.distinct()
    if problem.config.projected:
        matrices = {}
        for name, weight in problem.weights.named():
            if weight.ndim > 1:
                matrices[name] = as_leaf(weight)
        leaves, named = leaves.change(**matrices), named | matrices
    sums = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in named.items()}
    batch, heads, queries, keys = problem.shape
    outputs = []
    for rows in torch.arange(queries).split(max(1, CHUNK // (batch * heads * keys))):
        with torch.set_grad_enabled(training):
            chosen = select_queries(leaves, rows, "top_left")
            output = plain_formula(chosen, chosen.allowed(None))
        outputs.append(output.detach())
        if training:
            gradients = torch.autograd.grad(output, list(named.values()), torch.ones_like(output))
            for name, gradient in zip(named, gradients, strict=True):
                sums[name] += gradient
    results = {"output": torch.cat(outputs, 1)}
    if training:
        for name, total in sums.items():
            results[f"{name}.grad"] = total.to(problem.query.dtype)
    return results


def _with_window_as_mask(problem: Problem) -> Problem:
    """Return the same problem, whose mask hides what is outside its window."""
    window = problem.options.window
    if window is None:
        return problem
    _, _, queries, keys = problem.shape
    seen = window_mask(queries, keys, window, "top_left", problem.query.device)
    return problem.change(mask=join_causal(problem.mask, seen)[None, None], window=None)


def memory_shortage(implementation: Implementation, workload: Workload) -> str:
    """Return why a workload would not fit into memory, as a phrase; empty if it should fit.

    The need is extrapolated from an eighth and a sixteenth of the length.
    """
    if workload.case.L * workload.case.S < LARGE:
        return ""
    try:
        eighth, sixteenth = (_peak_of_part(implementation, workload, part) for part in (8, 16))
    except (Violation, AdapterError):  # the whole length will show it too
        return ""
    # One part grows with the square of the length, the rest with the length.
    square = max(0, 128 * (eighth - 2 * sixteenth))
    needed, limit = square + 8 * max(0.0, eighth - square / 64), memory_limit(workload.case.device)
    if needed <= SHARE * limit:
        return ""
    return (
        f"it would need about {needed / 2**30:.0f} GiB of memory, and there are"
        f" {limit / 2**30:.0f} GiB"
    )


def _peak_of_part(implementation: Implementation, workload: Workload, part: int) -> int:
    """Return the peak memory at 1/part of the length, in bytes, after a call to warm up."""
    case = replace(workload.case, L=workload.case.L // part, S=workload.case.S // part)
    short = replace(workload, case=case)
    runner = Runner(implementation, short, short.problems())
    runner.run()
    return peak_memory(runner.run, workload.case.device)


def _synchronize(workload: Workload) -> None:
    if workload.case.device == "cuda":
        torch.cuda.synchronize()
