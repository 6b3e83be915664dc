"""What the plugin keeps on pytest's config; without torch, since every pytest run of an environment imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mha.conformance.pytest_plugin.selection import Selection
    from mha.conformance.results import Report

SELECTION: pytest.StashKey[Selection] = pytest.StashKey()
REPORT: pytest.StashKey[Report] = pytest.StashKey()
UNWRITTEN: pytest.StashKey[list[str]] = pytest.StashKey()


def is_benchmark_run(config: pytest.Config) -> bool:
    """Return whether this run is for benchmarks."""
    return bool(config.getoption("benchmark_only", False))
