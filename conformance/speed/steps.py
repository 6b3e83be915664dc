"""The steps that are timed, and the memory that they take."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mha.conformance.guard import guarded
from mha.spec import Problem

Results = dict[str, Tensor]


def nothing() -> None:
    """Clear no gradients."""


def stepping(
    call: Callable[[Problem], Tensor],
    problem: Problem,
    upstream: Tensor,
    *,
    training: bool,
    clear: Callable[[], object] = nothing,
) -> tuple[Problem, Callable[[], Results]]:
    """Return the inputs that are called with, and a function that calls and, in training, differentiates.

    No gradient is left for the next call to add to. upstream: of the output, for the backward pass. clear: takes away
    the gradients of the weights.
    """
    problem = problem.map_inputs(lambda x: x.detach().clone().requires_grad_(training))
    leaves = {id(x): (name, x) for name in ("value", "key", "query") for x in (getattr(problem, name),)}

    def run() -> Results:
        with torch.set_grad_enabled(training):
            output = call(problem)
        found = {"output": output.detach()}
        if training:
            with guarded("backward()"):
                output.backward(upstream)
            found |= {f"{name}.grad": leaf.grad for name, leaf in leaves.values() if leaf.grad is not None}
            for _, leaf in leaves.values():
                leaf.grad = None
            clear()
        if problem.query.is_cuda:
            torch.cuda.synchronize()
        return found

    return problem, run


def decoding(attention: Any, problem: Problem) -> Callable[[], Results]:
    """Return the decoding of the last token, always from the same cache of those before it."""
    length, cache = problem.shape[3], None
    for place in range(length - 1):
        token = problem.key[:, place : place + 1]
        with torch.no_grad(), guarded("decode"):
            cache = attention.decode(token, token, problem.value[:, place : place + 1], cache)[1]
    last = problem.key[:, length - 1 :], problem.value[:, length - 1 :]

    def run() -> Results:
        with torch.no_grad(), guarded("decode"):
            output = attention.decode(problem.query, *last, cache)[0]
        if problem.query.is_cuda:
            torch.cuda.synchronize()
        return {"output": output}

    return run


@contextmanager
def silent() -> Iterator[None]:
    """Keep from the terminal what the profiler says of itself, which no setting of its own does."""
    before = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def peak_memory(run: Callable[[], object], device: str) -> int:
    """Return the most bytes that torch held at once during a call, beyond those that it held before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most
