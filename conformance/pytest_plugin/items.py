"""What pytest collects and runs: one item for each clause, implementation, device and dtype."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mha.conformance.engine.judge import judge
from mha.conformance.harness import isolation
from mha.conformance.properties.registry import properties
from mha.conformance.pytest_plugin.selection import selection
from mha.conformance.pytest_plugin.stash import is_benchmark_run
from mha.conformance.reports.text import describe
from mha.conformance.results import Verdict
from mha.implementations import Resolved

isolation.STOPS += [pytest.fail.Exception, pytest.exit.Exception]


class ContractFile(pytest.File):
    """A module of properties, collected as the items of the clauses that it tests."""

    def collect(self) -> Iterable[pytest.Item]:
        """Yield an item for each clause, implementation, device and dtype."""
        chosen = selection(self.config)
        settings = chosen.settings
        given = self.config.getoption("timeout", None)  # of pytest-timeout, if that is there
        timeout = settings.limits.timeout if given is None and self.config.pluginmanager.hasplugin("timeout") else 0
        clauses = [clause for clause, (first, *_) in properties().items() if first.module == self.path.stem]
        # The dtypes of a clause come one after another, for they share the boundary cases.
        for resolved, device, clause, dtype in product(
            chosen.implementations.values(), settings.devices, clauses, settings.dtypes
        ):
            item = ContractItem.from_parent(
                self,
                name=f"contract[{resolved.implementation.name}-{device}-{dtype}-{clause}]",
                subject=(resolved, clause, dtype, device),
            )
            if timeout:
                item.add_marker(pytest.mark.timeout(timeout, method="thread"))
            yield item


class BenchmarkFile(pytest.Module):
    """The module of benchmarks, under its own name: pytest would import it under another."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Yield the benchmarks; none in a run that did not ask for them."""
        return super().collect() if is_benchmark_run(self.config) else []

    def _getobj(self) -> ModuleType:
        return importlib.import_module("mha.conformance.pytest_plugin.benchmarks")


class ContractItem(pytest.Item):
    """One clause, judged for one implementation in one dtype on one device."""

    def __init__(self, *, subject: tuple[Resolved, str, str, str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.subject = subject

    def runtest(self) -> None:
        """Judge, and report the outcome to pytest in its own terms."""
        verdict = judge(*self.subject, selection(self.config).settings)
        self.user_properties.append(("mha", asdict(verdict)))
        if verdict.status == "not_claimed":
            pytest.skip(f"not claimed: {verdict.message}")
        if verdict.status == "harness_error" or not verdict.conforms:
            raise Nonconformance(verdict)
        if verdict.status != "pass":  # waived, or a SHOULD that does not hold
            pytest.xfail(verdict.message)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Describe a failure; an exception of our own keeps its traceback."""
        if isinstance(excinfo.value, Nonconformance):
            return describe(excinfo.value.verdict)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Name the item as it is written on the command line."""
        return self.path, None, self.name


class Nonconformance(Exception):
    """Carries to pytest a verdict that is not a pass."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(f"{verdict.clause}: {verdict.message}")
        self.verdict = verdict
