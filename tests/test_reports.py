"""Reports: each form says what was found, none loses anything, and none obeys what it reports."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from reports_made import HOSTILE, hostile, report, two_implementations, verdict

from mha.conformance.reports.compare import differences, merged
from mha.conformance.reports.files import FORMS, rendered
from mha.conformance.reports.github import annotated
from mha.conformance.reports.summary import share
from mha.conformance.reports.terminal import matrix
from mha.conformance.reports.text import describe, summarise
from mha.conformance.results import OF_THE_MOMENT, Report

SCHEMA = Path(__file__).resolve().parent.parent / "docs" / "report.schema.json"
FAILS = "fail MSK-8 (float32 cpu): output_2[0, 0, 0] is nan, but should be 0.5"


def test_json_is_read_as_it_was_written() -> None:
    made = two_implementations()
    assert Report.from_json(made.to_json()) == made
    half = hostile()  # of a character, which JSON cannot hold
    assert Report.from_json(half.to_json()).verdicts[0].message == half.verdicts[0].message.replace("\udc80", "?")


def test_published_schema_is_that_of_the_reports() -> None:
    assert json.loads(SCHEMA.read_text()) == Report.schema(), "renew it: mha report --schema > docs/report.schema.json"
    told = json.loads(two_implementations().to_json())
    assert set(told) == set(Report.schema()["properties"])
    assert set(told["verdicts"][0]) == set(Report.schema()["$defs"]["Verdict"]["properties"])
    assert {"started", "host"} <= set(told)
    assert set(OF_THE_MOMENT) <= {*told, *told["verdicts"][0]}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nonsense", "it is no JSON"),
        ("{}", "it does not say its format"),
        ("[" * 100_000, "it is no JSON"),
        ('{"format": 1}', "verdicts: Field required"),
        (two_implementations().to_json().replace('"seed": 0', '"seed": "0"'), "seed: Input should be a valid integer"),
        (two_implementations().to_json().replace('"status": "waived"', '"status": "good"'), "verdicts.4.status"),
        (two_implementations().to_json().replace('"format": 1', '"format": 2'), "a report of format 2"),
        (two_implementations().to_json().replace("MSK-8", "MSK-99"), "MSK-99, which the contract of this version"),
    ],
)
def test_text_that_is_no_report_is_told(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        Report.from_json(text)


def test_matrix_has_a_cell_for_each_family() -> None:
    lines = matrix(two_implementations().verdicts)
    assert lines[0].split() == ["SHP", "MSK", "CAU", "NUM"]
    assert [line.split() for line in lines[2:4]] == [["wrong", "✓", "✗1", "-", "w1"], ["right", "✓", "✓", "✓", "✓"]]
    assert lines[4].startswith("✗ fails   w waived   ✓ kept   - not claimed   (a cell has the worst of its family")


def test_matrix_without_colour_and_letters_of_its_own_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = two_implementations().verdicts
    colored = matrix(verdicts, color=True)
    assert "\x1b[" in "".join(colored)
    assert [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in colored] == matrix(verdicts)
    monkeypatch.setenv("NO_COLOR", "1")
    assert matrix(verdicts, color=True) == matrix(verdicts)
    plain = matrix(verdicts, plain=True)
    assert "".join(plain).replace("─", "").isascii()
    assert plain[2].split() == ["wrong", ".", "x1", "-", "w1"]


def test_matrix_goes_on_below_where_the_terminal_is_narrow() -> None:
    lines = matrix(two_implementations().verdicts, width=14)
    assert [line.split() for line in lines if line.endswith(("MSK", "NUM"))] == [["SHP", "MSK"], ["CAU", "NUM"]]
    assert max(map(len, lines)) <= 14


def test_share_counts_clauses_that_are_met_everywhere() -> None:
    one = [verdict("x", "SHP-1"), verdict("x", "SHP-1", "fail", dtype="float64"), verdict("x", "CAU-1", "not_claimed")]
    assert share([*one, verdict("x", "MSK-8")]) == (1, 2)


def test_markdown_tells_failures_and_no_more() -> None:
    text = rendered(two_implementations(), ".md")
    assert "| `wrong` | DOES NOT CONFORM | 1 of 4 | ✓ | ✗1 | - | w1 |" in text
    assert "| `right` | conforms | 5 of 5 | ✓ | ✓ | ✓ | ✓ |" in text
    assert text.count("<details>") == 1
    assert "<summary>fail MSK-8, wrong, float32 on cpu: Empty rows follow one declared policy</summary>" in text
    assert "Case: `Case(mask='empty_rows')`" in text


def test_annotations_are_errors_and_notices() -> None:
    lines = list(annotated(two_implementations().verdicts))
    assert [line.split(" title=")[0] for line in lines] == ["::error", "::notice", "::notice"]
    title = "MSK-8 wrong float32%3A Empty rows follow one declared policy"
    assert lines[0].startswith(f"::error title={title}::output_2[0, 0, 0] is nan")


@pytest.mark.parametrize("form", FORMS)
def test_nothing_that_is_reported_is_obeyed(form: str) -> None:
    text = rendered(hostile(), form)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    if form == ".json":
        return
    assert len(text) < 600_000
    text.encode()
    outside = re.sub("`[^`\n]*`", "", text)  # of code in Markdown
    assert "<img" not in outside
    assert "<script>window" not in outside


def test_terminal_and_runner_obey_nothing() -> None:
    found = hostile().verdicts
    texts = [
        *matrix(found),
        *summarise(found),
        describe(replace(found[0], script=HOSTILE)),
        *annotated(found),
    ]
    lines = [line for text in texts for line in text.splitlines()]
    for line in lines:
        assert all(c.isprintable() for c in line), line
        assert len(line) < 5000
    assert sum(line.startswith("::") for line in lines) == 1


def test_shards_are_merged_in_the_order_of_the_contract() -> None:
    whole = two_implementations()
    shards = [replace(whole, verdicts=whole.verdicts[place::3], started=str(3 - place)) for place in range(3)]
    found = merged(shards)
    assert found.verdicts == whole.verdicts
    assert found.started == "1"
    assert merged([whole, whole]).verdicts == whole.verdicts


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (report(verdict("wrong", "MSK-8")), "there are two verdicts on wrong cpu float32 MSK-8"),
        (report(seed=1), "seed is 0 in one, 1 in another"),
    ],
)
def test_reports_of_two_runs_are_not_merged(other: Report, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        merged([two_implementations(), other])


def test_differences_tell_what_broke_and_what_was_mended() -> None:
    before = two_implementations()
    changed = {
        ("wrong", "MSK-8"): verdict("wrong", "MSK-8"),
        ("right", "SHP-1"): verdict("right", "SHP-1", "fail"),
        ("right", "CAU-1"): verdict("right", "CAU-1", margin=0.9),
        ("right", "MSK-8"): verdict("right", "MSK-8", seconds=60.0),
    }
    after = replace(before, verdicts=tuple(changed.get((v.implementation, v.clause), v) for v in before.verdicts[1:]))
    lines, broken = differences(before, after)
    assert broken == 1
    text = "\n".join(lines)
    for block in (
        "new failures: 1\n    SHP-1   right, float32 on cpu (fail): output_2[0, 0, 0] is nan",
        "mended: 1\n    MSK-8   wrong, float32 on cpu (pass)",
        "less exact: 1\n    CAU-1   right, float32 on cpu (pass): error/bound 0.4, now 0.9",
        "no longer judged: 1\n    SHP-1   wrong, float32 on cpu (pass)",
        "9 verdicts, 7 as before",
    ):
        assert block in text
    same = ["", "still failing: 1", "    MSK-8   wrong, float32 on cpu (fail)", "", "10 verdicts, 10 as before"]
    assert differences(before, before) == (same, 0)


def test_differences_hide_nothing() -> None:
    one = report(verdict("x", "SHP-1"))
    grown = report(verdict("x", "SHP-1"), verdict("x", "MSK-8", "fail"), verdict("x", "MSK-1", "fail"))
    lines, status = differences(one, grown)
    assert (lines[-1], status) == ("3 verdicts, 1 as before", 1)
    for after in ("not_claimed", "waived"):
        lines, status = differences(one, report(verdict("x", "SHP-1", after)))
        assert lines[2].endswith(f"({after.replace('_', ' ')}), before: pass")
        assert (lines[-1], status) == ("1 verdicts, 0 as before", 0)
    lines, status = differences(one, report(incomplete=True))
    assert lines[0] == "INCOMPLETE: the second was stopped"
    assert "no longer judged: 1" in lines
    assert status == 2


@pytest.mark.parametrize(
    ("status", "told"), [("harness_error", "CANNOT BE JUDGED"), ("not_claimed", "NOTHING WAS JUDGED")]
)
def test_page_says_conforms_only_of_what_does(status: str, told: str) -> None:
    page = rendered(report(verdict("x", "SHP-1", status)), ".html")
    assert "0 of 1 implementations conform." in page
    assert f"✗ {told}" in page


def test_two_long_names_are_two_columns() -> None:
    long = "x" * 80
    page = rendered(report(verdict(f"{long}a", "SHP-1"), verdict(f"{long}b", "SHP-1", "fail")), ".html")
    assert "1 of 2 implementations conform." in page
    assert page.count("DOES NOT CONFORM") == 1
    assert page.count(f"{long} ... (81 characters) (2)</span>") == 1


def test_exit_status_is_2_where_not_all_was_judged() -> None:
    right = verdict("x", "SHP-1")
    assert report(right).exit_status == 0
    assert report(right, verdict("x", "MSK-8", "fail")).exit_status == 1
    for given in ({"incomplete": True}, {"broken": {"mine": "ImportError"}}):
        assert report(right, **given).exit_status == 2
        assert not report(right, **given).conforms
    assert report(right, verdict("x", "CFG-2", "harness_error")).exit_status == 2
    assert report().exit_status == 2


def test_hostile_names_are_shown_in_one_line() -> None:
    (line, *_) = summarise(hostile().verdicts)
    assert line.startswith("</script><script>window.pwned=1</script>")
    assert HOSTILE not in line
