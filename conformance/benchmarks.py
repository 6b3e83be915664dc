"""Time and peak memory of every implementation that conforms: `pytest conformance --benchmark-only`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from mha.conformance.cases.case import Case
from mha.conformance.judge import check
from mha.conformance.pytest_items import Selection
from mha.conformance.pytest_plugin import selection
from mha.conformance.speed.steps import peak_memory
from mha.conformance.speed.work import SHAPES, Reference, Runner, Work
from mha.conformance.violation import Violation
from mha.spec import Implementation, Problem

PASSES = ("inference", "training")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One benchmark for each dtype, device, shape, pass and implementation; what is compared runs side by side."""
    chosen = selection(metafunc.config)
    metafunc.parametrize("dtype", chosen.dtypes)
    metafunc.parametrize("device", chosen.devices)
    work = [(shape, steps) for shape in SHAPES for steps in PASSES if (shape, steps) != ("token", "training")]
    metafunc.parametrize(("shape", "steps"), work)
    metafunc.parametrize("implementation", chosen.implementations, ids=lambda implementation: implementation.name)


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")
def test_speed(
    benchmark: Any,
    request: pytest.FixtureRequest,
    implementation: Implementation,
    shape: str,
    steps: str,
    dtype: str,
    device: str,
) -> None:
    """Time one implementation, if it conforms and what it gives for these sizes is right, before and after."""
    work = Work(shape, Case(**SHAPES[shape], dtype=dtype, device=device), steps == "training")
    missing = work.unclaimed(implementation.claims)
    if missing:
        pytest.skip(f"{implementation.name} is not timed: {missing}")
    failed = failed_clauses(implementation, dtype, device, selection(request.config))
    if failed:
        pytest.fail(f"{implementation.name} is not timed: it does not conform ({failed})", pytrace=False)
    try:
        problems, reference = prepared(work)
        runner = Runner(implementation, work, problems)
        reference.expect(runner.run(), 0)
        memory = peak_memory(runner.run, device)
        benchmark.group = work.title
        benchmark.name = f"{implementation.name} ({memory / 2**20:.1f} MiB)"
        benchmark.extra_info["peak_memory_bytes"] = memory
        reference.expect(benchmark(runner.run), 0)
        runner.load(1)  # what was kept for the addresses of the inputs is wrong now
        reference.expect(runner.run(), 1)
    except Violation as violation:
        pytest.fail(f"{implementation.name}: {violation.message}", pytrace=False)


@lru_cache(maxsize=2)
def prepared(work: Work) -> tuple[list[Problem], Reference]:
    """Return the problems of a work, and what is right for them: once for all implementations."""
    problems = work.problems()
    return problems, Reference(work, problems)


_judged: dict[tuple[int, str, str], str] = {}


def failed_clauses(implementation: Implementation, dtype: str, device: str, chosen: Selection) -> str:
    """Return the clauses that keep an implementation from conforming; nothing if it conforms."""
    key = id(implementation), dtype, device
    if key not in _judged:
        _judged[key] = check(
            implementation,
            chosen.profile,
            chosen.seed,
            dtypes=[dtype],
            devices=[device],
            waivers=chosen.waivers,
            strict=chosen.strict,
        ).failing
    return _judged[key]
