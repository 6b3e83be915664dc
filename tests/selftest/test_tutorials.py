"""The table of docs/tutorials.md: which clauses the common forms of attention violate."""

from __future__ import annotations

import re

import pytest

from mha.conformance import check
from mha.conformance.faults import tutorials
from support.folders import DOCS

pytestmark = pytest.mark.usefixtures("undiagnosed")

DOCUMENT = (DOCS / "tutorials.md").read_text(encoding="utf-8")
# The form, the clauses it violates in float32, and those that are blocked.
ROWS = re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|;]*)(?:; ([^|]*))? \|$", DOCUMENT, re.MULTILINE)
IN_FLOAT64 = "CFG-4 SMX-2 SMX-6 HED-1 HED-4 EQV-9 NUM-1 NUM-2 NUM-6"


def clauses_of(text: str) -> list[str]:
    """Return the clauses that a text names, in order."""
    return re.findall(r"[A-Z]{3}-\d+", text)


def statuses(form: str, dtype: str, clauses: list[str]) -> list[tuple[str, str]]:
    """Judge a form by some clauses; return the status of each."""
    report = check(getattr(tutorials, form), "quick", clauses=clauses, dtypes=[dtype])
    return [(verdict.clause, verdict.status) for verdict in report.verdicts]


@pytest.mark.mostly_slow(2)
@pytest.mark.usefixtures("undiagnosed", "unshrunk")
@pytest.mark.parametrize(("form", "violated", "blocked"), ROWS, ids=[row[0] for row in ROWS])
def test_table_of_tutorials_is_correct(form: str, violated: str, blocked: str) -> None:
    assert statuses(form, "float32", clauses_of(violated)) == [
        (clause, "fail") for clause in clauses_of(violated)
    ]
    *waiting, cause = clauses_of(blocked) or [""]
    if waiting:
        found = dict(statuses(form, "float32", [*waiting, cause]))
        assert found == {cause: "fail"} | dict.fromkeys(waiting, "blocked")


def test_table_has_every_form() -> None:
    assert [row[0] for row in ROWS] == ["vectorized", "minimal", "modular", "einops", "fused_qkv"]


@pytest.mark.usefixtures("undiagnosed", "unshrunk")
def test_scale_in_float32_fails_in_float64() -> None:
    assert ", ".join(IN_FLOAT64.split()[:-1]) in re.sub(r"\s+", " ", DOCUMENT)
    assert statuses("modular", "float64", IN_FLOAT64.split()) == [
        (clause, "fail") for clause in IN_FLOAT64.split()
    ]


def test_fill_value_of_tutorials_does_not_fit_in_float16() -> None:
    (verdict,) = check(
        tutorials.vectorized, "quick", clauses=["MSK-1"], dtypes=["float16"]
    ).verdicts
    assert verdict.status == "fail"
    assert "Half without overflow" in verdict.message
