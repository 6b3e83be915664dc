"""Fixtures that several modules of tests use."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mha.conformance import settings
from mha.conformance.engine import judge, workers
from mha.conformance.engine.search import Search
from mha.conformance.engine.sensitivity import Sensitivity

# The tests use all cores by themselves, and change the judge of their own process.
os.environ["MHA_JOBS"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what takes long, and of what is `mostly_slow` all cases but the first, unless `make
    lattice` runs them.
    """
    if os.environ.get("LATTICE"):
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
    """Let the tests fork what judges for them, which is fast, and has the judge as a test has
    changed it.

    Torch has no threads here, which a fork would lack: `OMP_NUM_THREADS` is 1.
    """
    if sys.platform == "linux" and torch.get_num_threads() == 1:
        monkeypatch.setattr(workers, "guard", SimpleNamespace(may_fork=lambda: True))


@pytest.fixture
def undiagnosed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for no cause of failures, which costs much where many classes fail;
    tests/diagnosis/test_diagnosis.py does.
    """
    monkeypatch.setattr(judge, "diagnose", lambda *_: "")
    monkeypatch.setattr(judge, "first_wrong_step", lambda *_: "")


@pytest.fixture
def unshrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the first failure as it is, unless `make lattice` shrinks it, which takes a third of the
    time of a fault.
    """
    if not os.environ.get("LATTICE"):
        # It returns None, so that no failure is worth it.
        monkeypatch.setattr(Search, "_worth_shrinking", Search._find_block)


def few(monkeypatch: pytest.MonkeyPatch, boundary: int) -> None:
    """Try so many boundary cases of each property, and no random case, unless `make lattice` tries
    them all.

    So few cases are not tried on known-bad answers, which would take as long again and could hardly
    prove too little; tests/selftest/test_coverage.py does that.
    """
    if not os.environ.get("LATTICE"):
        fewer = replace(settings.PROFILES["quick"], boundary=boundary, examples=0)
        monkeypatch.setitem(settings.PROFILES, "quick", fewer)
        monkeypatch.setattr(Sensitivity, "sample", lambda *_: None)


@pytest.fixture
def fewer_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try a few of the cases of the quick profile, where each property must have one that applies."""
    few(monkeypatch, boundary=2)


@pytest.fixture
def fewest_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try a case of each property on a class that is right."""
    few(monkeypatch, boundary=1)
