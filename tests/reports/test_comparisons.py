"""Comparisons of two reports: what has changed, an entry for each cause, in every format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mha.conformance.reports.changes import FORMATS as CHANGES
from mha.conformance.reports.changes import write_changes
from mha.conformance.reports.compare import Comparison, describe_changes
from mha.conformance.reports.files import FORMATS
from mha.conformance.results import Report
from support.reports_made import hostile, report, two_implementations, verdict


def changes(before: Report, after: Report) -> tuple[Sequence[str], int]:
    """Return the lines and the exit status of a comparison."""
    comparison = Comparison(before, after)
    return describe_changes(comparison), comparison.exit_status


def test_comparison_lists_new_failures_and_what_was_fixed() -> None:
    before = two_implementations()
    changed = {
        ("faulty", "MSK-8"): verdict("faulty", "MSK-8"),
        ("correct", "SHP-1"): verdict("correct", "SHP-1", "fail"),
        ("correct", "CAU-1"): verdict("correct", "CAU-1", margin=0.9),
        ("correct", "MSK-8"): verdict("correct", "MSK-8", seconds=60.0),
    }
    before = replace(before, verdicts=tuple(replace(v, seconds=1.0) for v in before.verdicts))
    after = replace(
        before,
        verdicts=tuple(changed.get((v.implementation, v.clause), v) for v in before.verdicts[1:]),
    )
    lines, status = changes(before, after)
    assert status == 1
    text = "\n".join(lines)
    for block in (
        "new failures: 1\n    SHP-1   correct, float32 on cpu (fail): output[0, 0, 0] is nan",
        "fixed: 1\n    MSK-8   faulty, float32 on cpu (pass)",
        (
            "less accurate: 1\n    CAU-1   correct, float32 on cpu (pass): error/bound 0.4 before,"
            " 0.9 now"
        ),
        (
            "counts: 2\n    faulty: answers 1 of 3 before, 1 of 2 now\n    correct: answers 4 of 4"
            " before, 3 of 4 now"
        ),
        "slower: 1\n    correct: 5 s before, 62 s now",
        "no longer judged: 1\n    SHP-1   faulty, float32 on cpu (pass)",
        "unchanged: 7 of 9 verdicts",
    ):
        assert block in text
    same = [
        "",
        "still failing: 1",
        "    MSK-8   faulty, float32 on cpu (fail)",
        "",
        "unchanged: 10 of 10 verdicts",
    ]
    assert changes(before, before) == (same, 0)


def causes() -> Comparison:
    """Return a comparison: an ignored mask breaks two clauses in two dtypes, and another alone."""
    ignored = {"diagnosis": "the mask is ignored", "message": "output is <off>"}
    before = report(verdict("x", "MSK-4"), verdict("x", "SHP-1", "fail"))
    after = report(
        *(
            verdict("x", c, "fail", dtype=d, **ignored)
            for c in ("MSK-1", "MSK-4")
            for d in ("float32", "float64")
        ),
        verdict("x", "NUM-1", "fail"),
        verdict("x", "SHP-1"),
    )
    return Comparison(before, after)


def test_comparison_has_one_entry_for_one_cause() -> None:
    text = "\n".join(describe_changes(causes()))
    cause = "the mask is ignored (one cause, 2 clauses: MSK-1, MSK-4)"
    assert (
        "new failures: 5, of 2 causes\n"
        f"    x, float32 on cpu; x, float64 on cpu (fail): {cause}: output is <off>\n"
        "    NUM-1   x, float32 on cpu (fail): output" in text
    )
    assert "fixed: 1\n    SHP-1   x, float32 on cpu (pass)" in text


@pytest.mark.parametrize("suffix", CHANGES)
def test_comparison_is_written_in_every_format(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"diff{suffix}"
    assert write_changes(causes(), file) == ""
    text = file.read_text()
    if suffix == ".json":
        data = json.loads(text)
        assert data["exit_status"] == 1
        cause, other = data["new_failures"]
        assert (cause["diagnosis"], cause["clauses"]) == ("the mask is ignored", ["MSK-1", "MSK-4"])
        assert [verdict["dtype"] for verdict in cause["verdicts"]] == ["float32", "float64"] * 2
        assert (other["clauses"], [each["clauses"] for each in data["fixed"]]) == (
            ["NUM-1"],
            [["SHP-1"]],
        )
    else:
        assert "New failures: 5, of 2 causes" in text
        assert text.count("the mask is ignored (one cause, 2 clauses: MSK-1, MSK-4)") == 1
        assert "output is &lt;off&gt;" in text


def test_comparison_of_hostile_reports_is_escaped(tmp_path: Path) -> None:
    comparison = Comparison(report(), hostile())
    for suffix in (".md", ".html"):
        write_changes(comparison, tmp_path / f"diff{suffix}")
        text = (tmp_path / f"diff{suffix}").read_text()
        assert "<img" not in text
        assert "\x1b" not in text
    assert "\n::error" not in (tmp_path / "diff.md").read_text()


def test_suffixes_of_comparisons_are_those_of_reports() -> None:
    assert tuple(CHANGES) == tuple(FORMATS)


def test_comparison_hides_nothing() -> None:
    one = report(verdict("x", "SHP-1"))
    grown = report(
        verdict("x", "SHP-1"), verdict("x", "MSK-8", "fail"), verdict("x", "MSK-1", "fail")
    )
    lines, status = changes(one, grown)
    assert (lines[-1], status) == ("unchanged: 1 of 3 verdicts", 1)
    for after in ("not_claimed", "waived"):
        lines, status = changes(one, report(verdict("x", "SHP-1", after)))
        assert lines[2].endswith(f"({after.replace('_', ' ')}), pass before")
        assert (lines[-1], status) == ("unchanged: 0 of 1 verdicts", 0)
    lines, status = changes(one, report(incomplete=True, seed=1))
    assert lines[:2] == ["seed: 0 before, 1 now", "INCOMPLETE: the second run was stopped"]
    assert "no longer judged: 1" in lines
    assert status == 2


def test_page_of_a_comparison_begins_with_what_decides() -> None:
    failed, passed = report(verdict("x", "MSK-8", "fail")), report(verdict("x", "MSK-8"))
    page = CHANGES[".html"](Comparison(passed, failed))
    assert '<div class="verdict fail"><h1>1 new failure, 0 fixed</h1></div>' in page
    page = CHANGES[".html"](Comparison(failed, passed))
    assert '<div class="verdict pass"><h1>0 new failures, 1 fixed</h1></div>' in page
