"""The keys of what the plugin stores in pytest's config. Neither it nor this imports torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mha.conformance.pytest_plugin.selection import Selection
    from mha.conformance.reports.journal import Journal
    from mha.conformance.results import Report, Verdict

SELECTION: pytest.StashKey[Selection] = pytest.StashKey()
REPORT: pytest.StashKey[Report] = pytest.StashKey()
# What could not be written, and why the exit status is 2: the last lines of a run.
UNWRITTEN: pytest.StashKey[list[str]] = pytest.StashKey()
REASONS: pytest.StashKey[list[str]] = pytest.StashKey()
# What takes the exit status of a run in a fork, its session, and what keeps its verdicts while it
# goes on.
FINISH: pytest.StashKey[Callable[[int], None]] = pytest.StashKey()
SESSION: pytest.StashKey[pytest.Session] = pytest.StashKey()
JOURNAL: pytest.StashKey[ExitStack] = pytest.StashKey()
KEPT: pytest.StashKey[Journal] = pytest.StashKey()
# Of an item.
VERDICT: pytest.StashKey[Verdict] = pytest.StashKey()


def is_benchmark_run(config: pytest.Config) -> bool:
    """Return whether the run is one of benchmarks."""
    return bool(config.getoption("benchmark_only", False))
