"""Time and peak memory of implementations that conform: `pytest conformance --benchmark-only`."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import ceil
from time import perf_counter
from typing import Any

import pytest
import torch

from mha.conformance.benchmarks.runner import Reference, Results, Runner, memory_shortage
from mha.conformance.benchmarks.workloads import EVERY_SHAPE, Workload, workloads_of
from mha.conformance.engine.judge import judge_all
from mha.conformance.engine.report import report_of_run
from mha.conformance.harness.errors import AdapterError, GpuLost, Violation
from mha.conformance.harness.memory import peak_memory
from mha.conformance.pytest_plugin.selection import selection
from mha.conformance.reports.text import visible_name
from mha.conformance.results import now
from mha.implementations.process.torch_state import threads
from mha.spec import Implementation, Problem

# The clauses that keep an implementation from conforming, by its name, dtype and device, since each
# is judged once a run.
FAILING: pytest.StashKey[dict[tuple[str, str, str], str]] = pytest.StashKey()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a benchmark for each workload, and for it of each implementation, one after another."""
    chosen = selection(metafunc.config)
    workloads = []
    for dtype, device in product(chosen.given.dtypes, chosen.given.devices):
        threads_tried = {1, torch.get_num_threads()} if device == "cpu" else {1}
        for workload, count in product(
            workloads_of(list(EVERY_SHAPE), dtype, device), sorted(threads_tried)
        ):
            workloads.append(replace(workload, threads=count))
    metafunc.parametrize("workload", workloads, ids=id_of)
    metafunc.parametrize(
        "implementation",
        [resolved.implementation for resolved in chosen.implementations.values()],
        ids=lambda implementation: implementation.name,
    )


def id_of(workload: Workload) -> str:
    """Return the words by which `-k` selects a workload."""
    mode = "training" if workload.training else "inference"
    count = "all_threads" if workload.threads > 1 else "one_thread"
    return f"{workload.case.dtype}-{workload.case.device}-{workload.name}-{mode}-{count}"


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")
def test_speed(
    benchmark: Any,
    request: pytest.FixtureRequest,
    implementation: Implementation,
    workload: Workload,
) -> None:
    """Time an implementation that conforms, and check its results in every round."""
    name = visible_name(implementation.name)
    reason = workload.unclaimed(implementation)
    if reason:
        pytest.skip(f"{name} is not timed: {reason}")
    dtype, device = workload.case.dtype, workload.case.device
    failing = failing_clauses(implementation, dtype, device, request.config)
    if failing:
        pytest.fail(f"{name} is not timed: it does not conform ({failing})", pytrace=False)
    with threads(workload.threads):
        reason = memory_shortage(implementation, workload)
        if reason:
            pytest.skip(f"{name} is not timed: {reason}")
        try:
            record(benchmark, request.config, implementation, workload)
        except (Violation, AdapterError, GpuLost) as failed:
            pytest.fail(f"{name}: {failed.message}", pytrace=False)


def record(
    benchmark: Any, config: pytest.Config, implementation: Implementation, workload: Workload
) -> None:
    """Time an implementation with the fixture of pytest-benchmark; raises Violation."""
    problems, reference = problems_of(workload)
    runner = Runner(implementation, workload, problems)
    reference.expect(runner.with_weight_gradients(runner.run()), 0)
    memory = peak_memory(runner.run, workload.case.device)
    benchmark.group = workload.title
    benchmark.name = f"{visible_name(implementation.name)} ({memory / 2**20:.1f} MiB)"
    benchmark.extra_info["peak_memory_bytes"] = memory
    rounds = CheckedRounds(runner, reference)
    benchmark.pedantic(rounds.run, setup=rounds.check_and_switch, rounds=rounds.count(config))
    rounds.check_and_switch()


class CheckedRounds:
    """Rounds that alternate between the inputs of two seeds; results are checked outside the time.

    A result that was cached by the address of its inputs is incorrect in the next round.
    """

    def __init__(self, runner: Runner, reference: Reference) -> None:
        self.runner, self.reference = runner, reference
        self.results: Results = {}

    def run(self) -> None:
        """Run the workload; this is timed."""
        self.results = self.runner.run()

    def check_and_switch(self) -> None:
        """Check the results of the last round, and load the inputs of the other seed."""
        if self.results:
            self.reference.expect(self.runner.with_weight_gradients(self.results), self.runner.seed)
        self.runner.load(1 - self.runner.seed)

    def count(self, config: pytest.Config) -> int:
        """Return how many rounds the options of pytest-benchmark give, by the seconds of one."""
        start = perf_counter()
        self.run()
        seconds = perf_counter() - start
        least = int(config.getoption("benchmark_min_rounds"))
        return max(least, ceil(float(config.getoption("benchmark_max_time")) / seconds))


# Once for all implementations: those on one workload run one after another.
@lru_cache(maxsize=2)
def problems_of(workload: Workload) -> tuple[list[Problem], Reference]:
    """Return the problems of a workload, and their expected results."""
    problems = workload.problems()
    return problems, Reference(workload, problems)


def failing_clauses(
    implementation: Implementation, dtype: str, device: str, config: pytest.Config
) -> str:
    """Return the clauses that keep an implementation from conforming, as text, or ""."""
    known = config.stash.setdefault(FAILING, {})
    key = implementation.name, dtype, device
    if key not in known:
        resolved = selection(config).implementations[implementation.name]
        settings = selection(config).settings[implementation.name].at(dtype, device)
        verdicts = judge_all(resolved, settings)
        targets = {implementation.name: ""}
        report = report_of_run(settings, verdicts, targets=targets, started=now())
        known[key] = report.failing
    return known[key]
