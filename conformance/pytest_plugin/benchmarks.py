"""Time and peak memory of every implementation that conforms: `pytest conformance --benchmark-only`."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from time import perf_counter
from typing import Any

import pytest
import torch

from mha.conformance.benchmarks.memory import peak_memory
from mha.conformance.benchmarks.runner import Reference, Results, Runner, unaffordable
from mha.conformance.benchmarks.workloads import SHAPES, Work, work_of
from mha.conformance.engine.judge import check
from mha.conformance.harness.errors import Violation
from mha.conformance.harness.isolation import threads
from mha.conformance.pytest_plugin.selection import selection
from mha.conformance.reports.text import shown
from mha.conformance.settings import Settings
from mha.spec import Implementation, Problem


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One benchmark for each work and implementation; what is compared runs side by side."""
    chosen = selection(metafunc.config)
    works = [
        work
        for dtype in chosen.settings.dtypes
        for device in chosen.settings.devices
        for shape in SHAPES
        for training in (False, True)
        for count in sorted({1, torch.get_num_threads()} if device == "cpu" else {1})
        if not ((work := work_of(shape, dtype, device, training=training, threads=count)).decodes and training)
    ]
    metafunc.parametrize("work", works, ids=name_of)
    metafunc.parametrize(
        "implementation",
        [each.implementation for each in chosen.implementations.values()],
        ids=lambda implementation: implementation.name,
    )


def name_of(work: Work) -> str:
    """Return the words by which `-k` selects a work."""
    steps, threads = "training" if work.training else "inference", "all_threads" if work.threads > 1 else "one_thread"
    return f"{work.case.dtype}-{work.case.device}-{work.name}-{steps}-{threads}"


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")
def test_speed(benchmark: Any, request: pytest.FixtureRequest, implementation: Implementation, work: Work) -> None:
    """Time one implementation, if it conforms and what it gives for these sizes is right, before and after."""
    device, name = work.case.device, shown(implementation.name)
    missing = work.unclaimed(implementation.claims)
    if missing:
        pytest.skip(f"{name} is not timed: {missing}")
    failed = failed_clauses(implementation, work.case.dtype, device, selection(request.config).settings)
    if failed:
        pytest.fail(f"{name} is not timed: it does not conform ({failed})", pytrace=False)
    with threads(work.threads):
        if why := unaffordable(implementation, work):
            pytest.skip(f"{name} is not timed: {why}")
        try:
            problems, reference = prepared(work)
            runner = Runner(implementation, work, problems)
            reference.expect(runner.seen(runner.run()), 0)
            memory = peak_memory(runner.run, device)
            benchmark.group = work.title
            benchmark.name = f"{name} ({memory / 2**20:.1f} MiB)"
            benchmark.extra_info["peak_memory_bytes"] = memory
            turns = Turns(runner, reference)
            benchmark.pedantic(turns.run, setup=turns.other, rounds=turns.rounds(request.config))
            turns.other()
        except Violation as violation:
            pytest.fail(f"{name}: {violation.message}", pytrace=False)


class Turns:
    """Rounds that take turns with the inputs: each output is checked, and what is kept of the other inputs is wrong."""

    def __init__(self, runner: Runner, reference: Reference) -> None:
        self.runner, self.reference = runner, reference
        self.results: Results = {}

    def run(self) -> None:
        """Do the work; this is timed."""
        self.results = self.runner.run()

    def other(self) -> None:
        """Check what the last round gave, and put in the other inputs."""
        if self.results:
            self.reference.expect(self.runner.seen(self.results), self.runner.place)
        self.runner.load(1 - self.runner.place)

    def rounds(self, config: pytest.Config) -> int:
        """Return how many rounds pytest-benchmark's options ask for, by the time of one."""
        start = perf_counter()
        self.run()
        seconds = perf_counter() - start
        least = int(config.getoption("benchmark_min_rounds"))
        return max(least, ceil(float(config.getoption("benchmark_max_time")) / seconds))


@lru_cache(maxsize=2)
def prepared(work: Work) -> tuple[list[Problem], Reference]:
    """Return the problems of a work, and what is right for them: once for all implementations."""
    problems = work.problems()
    return problems, Reference(work, problems)


_judged: dict[tuple[int, str, str], str] = {}


def failed_clauses(implementation: Implementation, dtype: str, device: str, settings: Settings) -> str:
    """Return the clauses that keep an implementation from conforming, as text; empty if it conforms."""
    key = id(implementation), dtype, device
    if key not in _judged:
        _judged[key] = check(
            implementation,
            settings.profile,
            settings.seed,
            dtypes=[dtype],
            devices=[device],
            waivers=settings.waivers,
            strict=settings.strict,
        ).failing
    return _judged[key]
