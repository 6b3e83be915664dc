"""What inference reads a class or a function as, and how it refuses one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mha.implementations import ImplementationError
from mha.implementations.inference.infer import Inference, infer
from support.judging import expect_pass

# What a class could be read wrong in: sizes, shapes, masks, values, gradients, dropout, the memory.
CLAUSES = (
    *("CFG-1", "CFG-4", "SHP-1", "SHP-4", "MSK-1", "MSK-2", "MSK-5", "CAU-1", "PTH-3"),
    *("HED-1", "NUM-1", "GRD-5", "DRP-3", "XAT-1"),
)


def findings(result: Inference) -> dict[str, str]:
    """Return what each row of the table says."""
    return {row.topic: row.finding for row in result.rows}


def evidence(result: Inference) -> dict[str, str]:
    """Return how each row of the table was found."""
    return {row.topic: row.evidence for row in result.rows}


def is_tested(result: Inference) -> bool:
    """Return whether nothing is assumed."""
    return not any("assumed" in row.evidence for row in result.rows)


def refusal_of(made: Callable[..., Any]) -> str:
    """Return the message with which inference refuses a class, which is one line."""
    with pytest.raises(ImplementationError) as raised:
        infer(made)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def expect_read(made: Callable[..., Any], row: str, judged: str, *more: str) -> Inference:
    """Expect a row in the table of a class, and that it conforms; return what was inferred.

    judged: a clause on which it must be judged. more: clauses beside `CLAUSES`.
    """
    result = infer(made)
    assert row in result.report(400)
    expect_pass(result, judged, also=(*CLAUSES, *more))
    return result
