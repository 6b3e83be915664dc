"""Fixtures that several modules of tests use."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from mha.conformance import settings
from mha.conformance.engine import judge

# The tests use all cores by themselves, and change the judge of their own process.
os.environ["MHA_JOBS"] = "1"


@pytest.fixture
def undiagnosed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for no cause of failures, which costs much where many classes fail; tests/test_diagnosis.py does."""
    monkeypatch.setattr(judge, "diagnose", lambda *_: "")
    monkeypatch.setattr(judge, "first_wrong_step", lambda *_: "")


@pytest.fixture
def fewer_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try a few of the cases of the quick profile on a correct class; `make lattice` tries them all."""
    if not os.environ.get("LATTICE"):
        quick = settings.PROFILES["quick"]
        fewer = replace(quick, boundary=3, examples=1)
        monkeypatch.setitem(settings.PROFILES, "quick", fewer)
