"""No frame above a call holds what the call should return, in any property."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from mha.conformance.faults.base import Complete
from mha.conformance.faults.hostile import hostile
from mha.spec import Expected, Output
from mha.spec.bounds import Ball
from support.judging import RIGHT, judged

FOUND: set[str] = set()
DEEPEST = 4


def answers_in(value: Any, depth: int = 0) -> bool:
    """Return whether a value is an expected result, or holds one."""
    if type(value) in (Ball, Expected):
        return True
    if depth == DEEPEST:
        return False
    if isinstance(value, dict):
        return any(answers_in(each, depth + 1) for each in value.values())
    if isinstance(value, list | tuple | set):
        return any(answers_in(each, depth + 1) for each in value)
    value = getattr(value, "__wrapped__", value)
    cells = getattr(value, "__closure__", None) or ()
    return any(answers_in(each.cell_contents, depth + 1) for each in cells if _is_set(each))


def _is_set(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def frames() -> Iterator[FrameType]:
    """Yield the frames above the caller's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


@hostile
def spies(self: Complete, *rest: Any) -> Output:
    """Right, and looks for answers in all frames above."""
    for frame in () if torch.compiler.is_compiling() else frames():
        if any(map(answers_in, frame.f_locals.values())):
            FOUND.add(frame.f_code.co_qualname)
    return Complete.attend(self, *rest)


@pytest.mark.slow
@pytest.mark.mostly_slow(1)
@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_frame_above_a_call_holds_an_answer(dtype: str) -> None:
    FOUND.clear()
    report = judged(spies, [], RIGHT, dtypes=[dtype])
    assert sorted(FOUND) == []
    assert [verdict.clause for verdict in report.verdicts if not verdict.conforms] == []
