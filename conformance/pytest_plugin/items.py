"""The items that pytest runs: one for each clause, implementation, device and dtype."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mha.conformance.engine.judge import judge, stopped
from mha.conformance.harness import isolation
from mha.conformance.harness.provenance import frames_of
from mha.conformance.properties.registry import properties
from mha.conformance.pytest_plugin.selection import selection
from mha.conformance.pytest_plugin.stash import KEPT, VERDICT, is_benchmark_run
from mha.conformance.reports.journal import STARTED
from mha.conformance.reports.text import describe
from mha.conformance.results import Verdict
from mha.conformance.settings import Settings, Task
from mha.conformance.shown import visible, visible_line
from mha.implementations import Resolved

# The fields of a verdict in an XML report of JUnit; the script is in the text of the failure.
JUNIT_FIELDS = (
    "implementation",
    "clause",
    "level",
    "dtype",
    "device",
    "status",
    "examples",
    "cases_to_failure",
    "margin",
    "case",
    "violated",
    "diagnosis",
    "message",
    "arguments",
    "blocked_by",
    "seconds",
)


def _is_of_timeout(error: BaseException) -> bool:
    """Return whether pytest-timeout ends a test: judged code may raise what pytest raises."""
    if not issubclass(type(error), pytest.fail.Exception):
        return False
    limit = getattr(sys.modules.get("pytest_timeout"), "timeout_sigalrm", None)
    own = getattr(limit, "__code__", None)
    return any(frame.f_code is own for frame in frames_of(error))


isolation.STOPS.append(_is_of_timeout)


class ContractFile(pytest.File):
    """A module of properties, collected as the items of the clauses that it tests."""

    def collect(self) -> Iterable[pytest.Item]:
        """Yield an item for each clause, implementation, device and dtype."""
        chosen = selection(self.config)
        for name, resolved in chosen.implementations.items():
            yield from self._items(resolved, chosen.settings[name])

    def _items(self, resolved: Resolved, settings: Settings) -> Iterable[pytest.Item]:
        timeout = settings.limits.timeout if self._may_set_timeout() else 0
        clauses = []
        for clause in settings.judged_clauses:
            if properties()[clause][0].module == self.path.stem:
                clauses.append(clause)
        # The dtypes of a clause come one after another, since they share the boundary cases.
        for device, clause, dtype in product(settings.devices, clauses, settings.dtypes):
            item = ContractItem.from_parent(
                self,
                name=f"contract[{resolved.implementation.name}-{device}-{dtype}-{clause}]",
                subject=(resolved, clause, dtype, device, settings),
            )
            if timeout:
                item.add_marker(pytest.mark.timeout(timeout, method="thread"))
            yield item

    def _may_set_timeout(self) -> bool:
        """Return whether pytest-timeout is installed, and no timeout was asked for."""
        return (
            self.config.pluginmanager.hasplugin("timeout")
            and self.config.getoption("timeout", None) is None
        )


class BenchmarkFile(pytest.Module):
    """The module of benchmarks, imported under its own name; pytest would give it another one."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Return the benchmarks; none in a run that did not ask for them."""
        return super().collect() if is_benchmark_run(self.config) else []

    def _getobj(self) -> ModuleType:
        return importlib.import_module("mha.conformance.pytest_plugin.benchmarks")


class ContractItem(pytest.Item):
    """One clause, judged for one implementation in one dtype on one device."""

    def __init__(self, *, subject: tuple[Resolved, str, str, str, Settings], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.subject = subject

    def runtest(self) -> None:
        """Judge the clause, and report the verdict in pytest's terms."""
        if KEPT in self.config.stash:
            resolved, *where, settings = self.subject
            begun = stopped(resolved, Task(*where), settings, "")
            self.config.stash[KEPT].note(replace(begun, message=STARTED))
        verdict = self.stash[VERDICT] = judge(*self.subject)
        self.user_properties += properties_of(verdict, self.subject[-1])
        report_outcome(verdict)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Describe a failure of the clause; any other exception is shown with its traceback."""
        if isinstance(excinfo.value, Nonconformance):
            return describe(excinfo.value.verdict)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return where the item is, and its name."""
        return self.path, None, self.name


def properties_of(verdict: Verdict, settings: Settings) -> Iterator[tuple[str, object]]:
    """Yield what `--junitxml` shows of a verdict, each in a property, but nothing empty.

    A failure that another one explains has its `blocked_by`: only at the end of the run is it known
    that both fail.
    """
    for name in JUNIT_FIELDS:
        value = getattr(verdict, name)
        if value:
            yield f"mha.{name}", visible(value) if isinstance(value, str) else value
    yield "mha.required", str(verdict.required).lower()
    yield "mha.profile", settings.profile
    yield "mha.seed", settings.seed


class Nonconformance(Exception):
    """Raised for a verdict that fails the item."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(f"{verdict.clause}: {visible(verdict.message)}")
        self.verdict = verdict


def report_outcome(verdict: Verdict) -> None:
    """End a test in pytest's terms: a skip for what is not claimed, an xfail for what is waived.

    A SHOULD that fails is an xfail too.
    """
    if verdict.status == "not_claimed":
        pytest.skip(f"not claimed: {visible_line(verdict.message)}")
    if verdict.status == "harness_error" or not verdict.conforms:
        raise Nonconformance(verdict)
    if verdict.status != "pass":
        pytest.xfail(visible_line(verdict.message))
