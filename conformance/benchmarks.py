"""Time and peak memory of every implementation that conforms: `pytest conformance --benchmark-only`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mha.conformance.cases.case import Case
from mha.conformance.expect import expect_close
from mha.conformance.judge import check
from mha.conformance.pytest_plugin import selection
from mha.conformance.trial import Trial
from mha.conformance.violation import Violation
from mha.conformance.waivers import Waiver
from mha.spec import Implementation, Problem, causal_mask

# Self-attention but for the last, which is one token's query against a cache of keys.
SHAPES: dict[str, dict[str, Any]] = {
    "small encoder": {"B": 8, "n_heads": 8, "head_dim": 64, "L": 128, "S": 128, "mask": "padding", "inputs": "self"},
    "long sequence": {"B": 1, "n_heads": 8, "head_dim": 64, "L": 2048, "S": 2048, "causal": True, "inputs": "self"},
    "one token": {"B": 8, "n_heads": 8, "head_dim": 64, "L": 1, "S": 1024, "inputs": "memory"},
}
PASSES = ("forward", "forward and backward")
# The rows of the output that are compared with the oracle.
ROWS = (0, 1, -2, -1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One benchmark for each dtype, device, shape, pass and implementation; what is compared runs side by side."""
    chosen = selection(metafunc.config)
    metafunc.parametrize("dtype", chosen.dtypes)
    metafunc.parametrize("device", chosen.devices)
    metafunc.parametrize("shape", SHAPES)
    metafunc.parametrize("steps", PASSES)
    metafunc.parametrize("implementation", chosen.implementations, ids=lambda implementation: implementation.name)


def test_speed(
    benchmark: Any,
    request: pytest.FixtureRequest,
    implementation: Implementation,
    shape: str,
    steps: str,
    dtype: str,
    device: str,
) -> None:
    """Time one implementation, if it conforms, and compare what it gave while it was timed with the oracle."""
    reason = objection(implementation, shape, steps, dtype, device, selection(request.config).waivers)
    if reason:
        pytest.skip(f"{implementation.name} is not timed: {reason}")
    case = Case(**SHAPES[shape], dtype=dtype, device=device, path="no_grad" if steps == "forward" else "train")
    problem = case.problem()
    run, given = timed(implementation, case, problem, backward=steps != "forward")
    memory = peak_memory(run, device)
    benchmark.group = f"{shape}, {steps}, {dtype} on {device}"
    benchmark.name = f"{implementation.name} ({memory / 2**20:.1f} MiB)"
    benchmark.extra_info["peak_memory_bytes"] = memory
    benchmark(run)
    expect_right(implementation, case, problem, given[-1])


@cache
def failed_clauses(implementation: Any, dtype: str, device: str, waivers: tuple[Waiver, ...]) -> str:
    """Return the clauses that keep an implementation from conforming, in the quick profile; none if it conforms."""
    report = check(implementation, "quick", dtypes=[dtype], devices=[device], waivers=waivers)
    return ", ".join(verdict.clause for verdict in report.verdicts if not verdict.conforms)


def objection(
    implementation: Implementation, shape: str, steps: str, dtype: str, device: str, waivers: tuple[Waiver, ...]
) -> str:
    """Return why an implementation is not timed, if it is not."""
    claims, sizes = implementation.claims, SHAPES[shape]
    if dtype not in claims.dtypes or device not in claims.devices:
        return f"{dtype} on {device} is not claimed"
    missing = {
        "cross_attention": sizes["inputs"] != "self" and not claims.cross_attention,
        "masks": "mask" in sizes and "bool" not in claims.masks,
        "causal": "causal" in sizes and claims.causal is None,
        "gradients": steps != "forward" and not claims.gradients,
    }
    for claim, is_missing in missing.items():
        if is_missing:
            return f"it does not claim {claim}"
    failed = failed_clauses(implementation, dtype, device, waivers)  # type: ignore[arg-type]  # hashed by identity
    return f"it does not conform ({failed})" if failed else ""


def timed(
    implementation: Implementation, case: Case, problem: Problem, *, backward: bool
) -> tuple[Callable[[], None], list[Tensor]]:
    """Return what is timed, and the list that its last output is left in."""
    problem = problem.map_inputs(lambda x: x.detach().clone().requires_grad_(backward))
    config, weights = problem.config, problem.weights
    attention = implementation.build(config, weights, dtype=problem.query.dtype, device=case.device)
    _ = attention.train() if backward else attention.eval()
    upstream, given = torch.ones_like(problem.query), list[Tensor]()

    def run() -> None:
        with torch.set_grad_enabled(backward):
            output = attention(
                problem.query, problem.key, problem.value, mask=problem.mask, is_causal=problem.is_causal
            ).output
        if backward:
            output.backward(upstream)
        given[:] = [output.detach()]
        if case.device == "cuda":
            torch.cuda.synchronize()

    return run, given


def peak_memory(run: Callable[[], None], device: str) -> int:
    """Return the most bytes that torch held at once during a call beyond those that it held before."""
    run()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
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


def expect_right(implementation: Implementation, case: Case, problem: Problem, output: Tensor) -> None:
    """Fail unless some rows of the output are within the bound of the oracle."""
    trial = Trial(implementation, case)
    rows = sorted({row % case.L for row in ROWS})
    mask = problem.mask
    if problem.is_causal:
        mask = causal_mask(case.L, case.S, implementation.claims.causal or "top_left", case.device)[rows]
    some = problem.change(query=problem.query[:, rows], mask=mask, is_causal=False)
    try:
        expect_close(trial.seen(output[:, rows], "output"), trial.answer(some).output, because="the oracle's value")
    except Violation as violation:
        pytest.fail(f"what was timed is wrong: {violation.message}", pytrace=False)
