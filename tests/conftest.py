"""Fixtures that several modules of tests use."""

from __future__ import annotations

import pytest

from mha.conformance.engine import judge


@pytest.fixture
def undiagnosed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for no cause of failures, which costs much where many classes fail; tests/test_diagnosis.py does."""
    monkeypatch.setattr(judge, "diagnose", lambda *_: "")
