"""Fixtures that several modules of tests use."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from mha.conformance.engine import judge, workers
from mha.conformance.engine.search import Search
from support.effort import EVERYTHING

# The tests use all cores by themselves, and change the judge of their own process.
os.environ["MHA_JOBS"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip slow tests, and all but the first of mostly slow ones, unless all are to run."""
    if EVERYTHING:
        return
    seen = Counter[str]()
    for item in items:
        test, _, _ = item.nodeid.partition("[")
        seen[test] += 1
        mostly = item.get_closest_marker("mostly_slow")
        if item.get_closest_marker("slow") or (mostly and seen[test] > mostly.args[0]):
            item.add_marker(pytest.mark.skip(reason="`make lattice` runs it"))


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests fork the processes that judge: it is fast, and keeps what a test has changed.

    Torch has no threads here, which a fork would lack: `OMP_NUM_THREADS` is 1.
    """
    if sys.platform == "linux" and torch.get_num_threads() == 1:
        monkeypatch.setattr(workers, "guard", SimpleNamespace(may_fork=lambda: True))


@pytest.fixture
def undiagnosed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for no cause of failures, as tests/diagnosis does: it costs much where many fail."""
    monkeypatch.setattr(judge, "diagnose", lambda *_: "")
    monkeypatch.setattr(judge, "first_wrong_step", lambda *_: "")


@pytest.fixture
def unshrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the first failure as it is: to shrink it takes a third of the time of a fault."""
    if not EVERYTHING:
        # It returns None, so that no failure is worth it.
        monkeypatch.setattr(Search, "_worth_shrinking", Search._find_block)
