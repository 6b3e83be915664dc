"""Waivers: what they cover, and that none outlives its reason."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from mha.conformance import Case, Verdict, check
from mha.conformance.faults import registry as faults
from mha.conformance.waivers import Waiver, WaiverError, built_in_waivers, read_waivers
from mha.conformance.waivers import validate_where as validate
from mha.conformance.waivers import where_holds as holds
from mha.implementations import resolve

WRONG, RIGHT = faults.implementations["NanInEmptyRow"], faults.correct
KNOWN = Waiver(implementation=WRONG.name, clause="MSK-8", reason="known")
TODAY = date.today()


def judged(waiver: Waiver, **options: Any) -> tuple[Verdict, ...]:
    """Return the verdicts on the implementation that a waiver names."""
    implementation = next(each for each in (WRONG, RIGHT) if each.name == waiver.implementation)
    return check(
        implementation, clauses=[waiver.clause], waivers=[waiver], **{"dtypes": ["float32"]} | options
    ).verdicts


def test_a_waiver_is_applied_and_a_stale_one_is_an_error() -> None:
    (waived,) = judged(KNOWN)
    assert waived.status == "waived"
    assert waived.message.endswith("[waived: known]")
    assert waived.violated == "empty_rows_follow_the_declared_policy"
    assert waived.conforms
    (stale,) = judged(replace(KNOWN, implementation=RIGHT.name))
    assert stale.status == "stale_waiver"
    assert stale.message == "nothing departs from this clause; delete its waiver: known"
    assert not stale.conforms


def test_a_waiver_of_some_cases_covers_no_others() -> None:
    assert judged(replace(KNOWN, where="n_heads >= 1"))[0].status == "waived"
    (fails,) = judged(replace(KNOWN, where="n_heads > 1"))
    assert fails.status == "fail"
    assert "[its waiver does not cover this case: known]" in fails.message
    assert fails.case is not None
    assert "n_heads" not in fails.case
    (stale,) = judged(replace(KNOWN, implementation=RIGHT.name, where="L > 1"))
    assert "nothing departs from this clause as the waiver says; delete its waiver" in stale.message


def test_a_waiver_of_an_error_covers_no_other_error() -> None:
    assert judged(replace(KNOWN, error="is nan, but should be"))[0].status == "waived"
    assert judged(replace(KNOWN, error="is inf"))[0].status == "fail"


def test_a_waiver_of_a_dtype_is_not_stale_in_another() -> None:
    found = judged(replace(KNOWN, dtype=("float64",)), dtypes=["float32", "float64"])
    assert [verdict.status for verdict in found] == ["fail", "waived"]
    right = judged(replace(KNOWN, implementation=RIGHT.name, device=("cuda",)))
    assert right[0].status == "pass"


def test_an_expired_waiver_waives_nothing() -> None:
    assert judged(replace(KNOWN, expires=TODAY + timedelta(days=2)))[0].status == "waived"
    past = replace(KNOWN, expires=TODAY - timedelta(days=2))
    (fails,) = judged(past)
    assert fails.status == "fail"
    assert f"[its waiver expired on {past.expires}: known]" in fails.message
    for waiver in (replace(past, implementation=RIGHT.name), replace(past, implementation=RIGHT.name, clause="GQA-1")):
        (stale,) = judged(waiver)
        assert stale.status == "stale_waiver"
        assert f"delete its waiver, which expired on {past.expires}: known" in stale.message
        assert not stale.conforms
    report = check(WRONG, clauses=["MSK-8"], dtypes=["float32"], waivers=[past, KNOWN])
    assert report.verdicts[0].status == "stale_waiver"


def test_a_stale_waiver_of_what_is_only_recommended_is_an_error() -> None:
    (stale,) = judged(Waiver(implementation=RIGHT.name, clause="CFG-2", reason="known"))
    assert stale.status == "stale_waiver"
    assert not stale.conforms


def test_waivers_that_overlap_are_both_needed() -> None:
    parts = [replace(KNOWN, where=where) for where in ("L >= 1", "S >= 1")]
    for waivers in (parts, [parts[0], KNOWN], [KNOWN, KNOWN]):
        report = check(WRONG, clauses=["MSK-8"], dtypes=["float32"], waivers=waivers)
        assert report.verdicts[0].status == "waived", report.verdicts[0].message
    whole = check(WRONG, clauses=["MSK-8"], dtypes=["float32"]).verdicts[0]
    assert judged(parts[0])[0].examples > whole.examples


def test_a_waiver_of_cases_that_do_not_come_up_is_not_stale() -> None:
    (verdict,) = judged(replace(KNOWN, implementation=RIGHT.name, where="S > 100000"))
    assert verdict.status == "pass"
    assert verdict.message == "no case of its waiver came up: S > 100000"


def test_a_waiver_of_what_is_not_claimed_is_an_error() -> None:
    waiver = Waiver(implementation=RIGHT.name, clause="GQA-1", reason="known")
    (stale,) = judged(waiver)
    assert stale.status == "stale_waiver"
    assert "nothing is judged: needs the claim grouped_query; delete its waiver: known" in stale.message


def test_the_built_in_waivers_are_all_needed() -> None:
    for waiver in built_in_waivers():
        implementation = resolve(waiver.implementation)[0].implementation
        report = check(
            implementation, clauses=[waiver.clause], dtypes=waiver.dtype or ("float32", "float64"), waivers=[waiver]
        )
        assert {verdict.status for verdict in report.verdicts} == {"waived"}, waiver


HEAD = '[[waiver]]\nimplementation = "x"\nclause = "MSK-1"\n'
WAIVER_FILES = {
    "not TOML": ("[[waiver]", "is not TOML"),
    "another table": ("[[weaver]]\n", "must hold only tables"),
    "no reason": (HEAD, "missing reason"),
    "an unknown key": (f'{HEAD}reason = "y"\nfor = 1\n', "unknown for"),
    "an unknown clause": (f'{HEAD}reason = "y"\n'.replace("MSK-1", "MSK-99"), "no clause"),
    "a number": (f"{HEAD}reason = 3\n", "must be a string"),
    "an unknown dtype": (f'{HEAD}reason = "y"\ndtype = "float8"\n', "dtype must be one or a list of float64"),
    "a dtype that is a number": (f'{HEAD}reason = "y"\ndtype = 8\n', "dtype must be one or a list of float64"),
    "a date in quotes": (f'{HEAD}reason = "y"\nexpires = "2030-01-01"\n', "expires must be a date"),
    "a call": (f"{HEAD}reason = 'y'\nwhere = '__import__(\"os\")'\n", "may only compare"),
    "an attribute": (f"{HEAD}reason = 'y'\nwhere = 'L.real == 1'\n", "may only compare"),
    "half an expression": (f"{HEAD}reason = 'y'\nwhere = 'L =='\n", "is no expression"),
    "an unknown field": (f"{HEAD}reason = 'y'\nwhere = 'T == 0'\n", "a case has no T; it has B, L, S"),
}


@pytest.mark.parametrize("what", WAIVER_FILES)
def test_malformed_waivers_are_told(what: str, tmp_path: Path) -> None:
    text, message = WAIVER_FILES[what]
    path = tmp_path / "waivers.toml"
    path.write_text(text)
    with pytest.raises(WaiverError, match=message):
        read_waivers(path)


def test_a_waiver_is_read_as_it_was_written(tmp_path: Path) -> None:
    waiver = replace(
        KNOWN, url="u", dtype=("float16",), device=("cuda", "cpu"), where="L == 'ü\"'", error="\t\x7f", expires=TODAY
    )
    (tmp_path / "w.toml").write_text(f"{waiver.to_toml()}\n{KNOWN.to_toml()}", encoding="utf-8")
    assert read_waivers(tmp_path / "w.toml") == [waiver, KNOWN]
    with pytest.raises(WaiverError, match="clauses of NanInEmptyRow, which is not judged here"):
        read_waivers(tmp_path / "w.toml", ["other"])


def test_the_waiver_of_the_readme_can_be_read(tmp_path: Path) -> None:
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
    (tmp_path / "w.toml").write_text(readme.split("```toml\n[[waiver]]")[1].split("```")[0].join(["[[waiver]]", ""]))
    (waiver,) = read_waivers(tmp_path / "w.toml", ["my-attention"])
    assert waiver.partial
    assert waiver.expires == date(2030, 12, 31)


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("L == 2", True),
        ("L != S and not causal", True),
        ("S * L > 7 or B == 1", True),
        ("mask in ('none', 'padding')", True),
        ("mask < 1", False),
        ("L % 0 == 1", False),
        ("causal", False),
    ],
)
def test_predicates_compare_the_fields_of_a_case(text: str, held: bool) -> None:
    validate(text)
    assert holds(text, Case(L=2, S=3)) is held
