"""The estimate of a run's time: it grows with what is judged, and is shown before anything is."""

from __future__ import annotations

import pytest

from mha.conformance.engine import estimate as module
from mha.conformance.engine.estimate import estimate, in_words
from mha.conformance.settings import Settings
from mha.spec import Claims


def test_plain_call_is_timed() -> None:
    assert module._seconds_of_a_plain_call() > 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a plain call take a millisecond."""
    monkeypatch.setattr(module, "_seconds_of_a_plain_call", lambda: 1e-3)


@pytest.mark.usefixtures("machine")
def test_estimate_grows_with_what_is_judged() -> None:
    def seconds(
        claims: Claims, profile: str = "quick", share: float = 100.0, **given: tuple[str, ...]
    ) -> int:
        _, number, unit = estimate([claims], Settings(profile=profile, **given), share).split()
        return int(number) * {"s": 1, "min": 60}[unit]

    both, one = Claims(), Claims(dtypes={"float32"})
    single = seconds(both, dtypes=("float32",))
    assert 15 <= single / 100 <= 60
    assert seconds(both) > 1.5 * single
    assert seconds(one) == single
    assert seconds(both, clauses=("MSK-1",)) < single / 20
    assert seconds(both, "default") > seconds(both)
    assert seconds(Claims(masks=(), causal=None), dtypes=("float32",)) < single
    assert seconds(both, share=50.0) == pytest.approx(seconds(both) / 2, abs=60)


def test_estimate_is_in_round_words() -> None:
    assert [in_words(seconds) for seconds in (0.0, 12.0, 89.0, 91.0)] == [
        "about 5 s",
        "about 10 s",
        "about 90 s",
        "about 2 min",
    ]
