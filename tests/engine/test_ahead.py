"""The process that judges a new version as the one before was understood, while others infer."""

from __future__ import annotations

import gc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from mha.conformance.engine import child
from mha.conformance.engine.ahead import Ahead
from mha.conformance.engine.found import Request
from mha.conformance.engine.watch import GarbledError
from mha.conformance.reports.summary import is_failure
from mha.conformance.results import Verdict, read_verdict
from mha.conformance.settings import Settings, Task

OFF_BY_ONE = """
def kernel(q, k, v, is_causal=False):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if is_causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape).tril(-1) == 0, float("-inf"))
    return scores.softmax(-1) @ v
"""
DECLARATION = """
from mha.implementations import from_kernel
from mha.spec import Claims

implementation = from_kernel(
    kernel,
    layout="b h l d",
    mask=None,
    claims=Claims(
        projections=False,
        returns_weights=False,
        masks=(),
        causal="bottom_right",
        dtypes={"float32"},
    ),
)
"""
SMOKE = Settings(profile="smoke", clauses=("CAU-2",), dtypes=("float32",))


class Ended(Exception):
    """No more is asked."""


def said_to(request: Request, tasks: list[tuple[str, Task, Settings]]) -> list[dict[str, Any]]:
    """Return what a process says to a request, and to tasks up to the first verdict."""
    asked, said = SimpleQueue[Any](), list[dict[str, Any]]()
    for each in (request, *tasks):
        asked.put(each)

    def say(message: dict[str, Any]) -> None:
        said.append(message)
        if "verdict" in message or ("found" in message and not tasks):
            raise Ended

    with suppress(Ended):
        child._judge_what_comes(asked, say)
    gc.unfreeze()
    return said


def test_a_case_that_fails_as_declared_before_is_said_before_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explained(verdict: Verdict, result: object) -> Verdict:
        return replace(verdict, diagnosis="off by one")

    monkeypatch.setattr("mha.conformance.engine.judge._explained", explained)
    file = tmp_path / "mine.py"
    file.write_text(OFF_BY_ONE)
    target = f"{file}:kernel"
    request = Request((target,), {target: DECLARATION}, as_declared=True)
    found, told, judged = said_to(request, [(target, SMOKE.tasks[0], SMOKE)])
    assert found["found"][0]["reading"] is None
    seen, verdict = read_verdict(told["failing"]), read_verdict(judged["verdict"])
    assert (seen.clause, seen.status, seen.diagnosis) == ("CAU-2", "fail", "")
    assert is_failure(seen)
    assert verdict.diagnosis == "off by one"


def test_why_a_version_is_as_declared_before_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_understood(*given: object) -> None:
        raise ValueError("no formula gives it")

    monkeypatch.setattr("mha.implementations.discovery.resolve.find", not_understood)
    file = tmp_path / "mine.py"
    file.write_text(OFF_BY_ONE)
    target = f"{file}:kernel"
    (found,) = said_to(Request((target,), {target: DECLARATION}), [])
    assert found["why_declared"] == "no formula gives it"


@pytest.mark.parametrize("said", [None, GarbledError()])
def test_a_process_that_has_ended_or_talks_nonsense_is_given_up(said: object) -> None:
    def received() -> object:
        if isinstance(said, Exception):
            raise said
        return said

    ended = list[bool]()
    worker: Any = SimpleNamespace(received=received, end=lambda: ended.append(True), channel=None)
    ahead = Ahead()
    ahead._worker = worker
    ahead.hear(pytest.fail)
    assert ended == [True]
    assert not ahead.channels
    ahead.hear(pytest.fail)
    ahead.end()


def test_only_failures_are_handed_on() -> None:
    messages = [{"found": []}, {"failing": "nonsense"}, {"verdict": {}}]
    worker: Any = SimpleNamespace(received=lambda: messages, end=bool, channel=None)
    ahead = Ahead()
    ahead._worker = worker
    ahead.hear(pytest.fail)
    assert ahead.channels
