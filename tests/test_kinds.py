"""Each kind of subject conforms, called only as it claims, and is judged on every clause that such calls can state."""

from __future__ import annotations

from pathlib import Path

import pytest
from kinds import KINDS, judge, row_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "coverage.md"


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_conforms_and_is_judged_as_the_table_says(kind: str) -> None:
    report = judge(kind)
    failed = {verdict.clause for verdict in report.verdicts if verdict.status not in ("pass", "not_claimed")}
    assert not failed, [verdict for verdict in report.verdicts if verdict.clause in failed]
    assert row_of(kind, report) in PAGE.read_text(encoding="utf-8")
