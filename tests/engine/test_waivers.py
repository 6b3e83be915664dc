"""Waivers: which failures they cover, and when they are stale."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from mha.conformance import Case, Verdict, check
from mha.conformance.faults import registry
from mha.conformance.settings import Settings
from mha.conformance.waivers import (
    Waiver,
    WaiverError,
    built_in_waivers,
    read_waivers,
    shipped_as,
    validate_where,
    where_holds,
)
from mha.implementations import discover, resolve
from mha.implementations.torch_mha import implementation as torch_mha
from support.folders import DOCS

FAULTY, CORRECT = registry.implementations["NanInEmptyRow"], registry.correct
KNOWN = Waiver(implementation=FAULTY.name, clause="MSK-8", reason="known")
FOR_CORRECT = replace(KNOWN, implementation=CORRECT.name)
TODAY = date.today()


def judged(waiver: Waiver, **options: Any) -> tuple[Verdict, ...]:
    """Return the verdicts on the implementation and the clause that a waiver names."""
    implementation = next(each for each in (FAULTY, CORRECT) if each.name == waiver.implementation)
    options = {"dtypes": ["float32"]} | options
    return check(implementation, clauses=[waiver.clause], waivers=[waiver], **options).verdicts


def test_failure_is_waived() -> None:
    (waived,) = judged(KNOWN)
    assert waived.status == "waived"
    assert waived.message.endswith("[waived: known]")
    assert waived.violated == "empty_rows_follow_the_declared_policy"
    assert waived.conforms


def test_waiver_of_a_passing_clause_is_stale() -> None:
    (stale,) = judged(FOR_CORRECT)
    assert stale.status == "stale_waiver"
    assert stale.message == "the clause does not fail; delete its waiver: known"
    assert not stale.conforms


def test_few_cases_make_no_waiver_stale() -> None:
    assert judged(FOR_CORRECT, profile="quick")[0].status == "pass"
    assert judged(FOR_CORRECT, profile="default")[0].status == "stale_waiver"


@pytest.mark.slow
def test_waiver_of_some_cases_covers_no_others() -> None:
    assert judged(replace(KNOWN, where="n_heads >= 1"))[0].status == "waived"
    (failed,) = judged(replace(KNOWN, where="n_heads > 1"))
    assert failed.status == "fail"
    assert "[not covered by its waiver: known]" in failed.message
    assert failed.case is not None
    assert "n_heads" not in failed.case
    (stale,) = judged(replace(FOR_CORRECT, where="L > 1"))
    assert "the clause does not fail as the waiver says; delete its waiver" in stale.message


def test_waiver_of_a_message_covers_no_other() -> None:
    assert judged(replace(KNOWN, error="is nan, but should be"))[0].status == "waived"
    assert judged(replace(KNOWN, error="is inf"))[0].status == "fail"


def test_waiver_of_a_dtype_is_not_stale_in_another() -> None:
    verdicts = judged(replace(KNOWN, dtype=("float64",)), dtypes=["float32", "float64"])
    assert [verdict.status for verdict in verdicts] == ["fail", "waived"]
    assert judged(replace(FOR_CORRECT, device=("cuda",)))[0].status == "pass"


def test_expired_waiver_waives_nothing() -> None:
    assert judged(replace(KNOWN, expires=TODAY + timedelta(days=2)))[0].status == "waived"
    past = replace(KNOWN, expires=TODAY - timedelta(days=2))
    (failed,) = judged(past)
    assert failed.status == "fail"
    assert f"[its waiver expired on {past.expires}: known]" in failed.message
    for waiver in (
        replace(past, implementation=CORRECT.name, clause=clause) for clause in ("MSK-8", "GQA-1")
    ):
        (stale,) = judged(waiver)
        assert stale.status == "stale_waiver"
        assert f"delete its waiver, which expired on {past.expires}: known" in stale.message
        assert not stale.conforms
    report = check(FAULTY, clauses=["MSK-8"], dtypes=["float32"], waivers=[past, KNOWN])
    assert report.verdicts[0].status == "stale_waiver"


def test_stale_waiver_of_a_recommendation_is_an_error() -> None:
    (stale,) = judged(Waiver(implementation=CORRECT.name, clause="CFG-2", reason="known"))
    assert stale.status == "stale_waiver"
    assert not stale.conforms


@pytest.mark.slow
def test_overlapping_waivers_are_both_needed() -> None:
    parts = [replace(KNOWN, where=where) for where in ("L >= 1", "S >= 1")]
    for waivers in (parts, [parts[0], KNOWN], [KNOWN, KNOWN]):
        report = check(FAULTY, clauses=["MSK-8"], dtypes=["float32"], waivers=waivers)
        assert report.verdicts[0].status == "waived", report.verdicts[0].message
    without = check(FAULTY, clauses=["MSK-8"], dtypes=["float32"]).verdicts[0]
    assert judged(parts[0])[0].examples > without.examples


def test_waiver_of_cases_that_are_not_tried_is_not_stale() -> None:
    (verdict,) = judged(replace(FOR_CORRECT, where="S > 100000"))
    assert verdict.status == "pass"
    assert verdict.message == "no case matches its waiver: S > 100000"


def test_waiver_of_an_unclaimed_clause_is_stale() -> None:
    (stale,) = judged(Waiver(implementation=CORRECT.name, clause="GQA-1", reason="known"))
    assert stale.status == "stale_waiver"
    assert (
        "nothing is judged: needs the claim grouped_query; delete its waiver: known"
        in stale.message
    )


@pytest.mark.slow
def test_built_in_waivers_are_all_needed() -> None:
    for waiver in built_in_waivers():
        if "cpu" not in (waiver.device or ("cpu",)):
            continue  # of what a GPU does
        implementation = resolve(waiver.implementation)[0].implementation
        report = check(
            implementation, clauses=[waiver.clause], dtypes=waiver.dtype or ("float32", "float64")
        )
        assert {verdict.status for verdict in report.verdicts} == {"waived"}, waiver


def test_built_in_waivers_apply_to_what_this_package_ships() -> None:
    shipped = [entry for entry in discover() if entry.target.startswith("mha.implementations.")]
    loaded = [entry.implementation for entry in shipped if entry.implementation]
    assert all(shipped_as(implementation) for implementation in loaded)
    names = {each.name for each in loaded}
    assert {waiver.implementation for waiver in built_in_waivers()} <= names
    of_torch_mha = tuple(
        waiver for waiver in built_in_waivers() if waiver.implementation == "torch_mha"
    )
    assert Settings().waivers_of(torch_mha) == of_torch_mha
    renamed = Settings().waivers_of(resolve("mine=torch_mha")[0].implementation)
    given = [(waiver.implementation, waiver.clause) for waiver in renamed]
    assert given == [("mine", waiver.clause) for waiver in of_torch_mha]


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(("implementation", "status"), [(CORRECT, "pass"), (FAULTY, "fail")])
def test_built_in_waivers_do_not_apply_to_another_of_the_same_name(
    implementation: Any, status: str
) -> None:
    namesake = replace(implementation, name="torch_mha")
    assert Settings().waivers_of(namesake) == ()
    (verdict,) = check(namesake, clauses=["MSK-8"], dtypes=["float32"]).verdicts
    assert verdict.status == status
    assert "waive" not in verdict.message


HEAD = '[[waiver]]\nimplementation = "x"\nclause = "MSK-1"\n'
TABLE = f'{HEAD}reason = "y"\n'
BAD_FILES = {
    "not TOML": ("[[waiver]", "is not valid TOML"),
    "another table": ("[[weaver]]\n", "must hold only tables"),
    "a list of numbers": ("waiver = [1]\n", "waiver 1: must be a table"),
    "no reason": (HEAD, "missing reason"),
    "a blank reason": (f'{HEAD}reason = " "\n', "needs a reason"),
    "an unknown key": (f"{TABLE}for = 1\n", "unknown for"),
    "an unknown clause": (TABLE.replace("MSK-1", "MSK-99"), "unknown clause 'MSK-99'"),
    "a number": (f"{HEAD}reason = 3\n", "reason must be a string, but is 3"),
    "an unknown dtype": (f'{TABLE}dtype = "float8"\n', "dtype must be one or a list of float64"),
    "a dtype that is a number": (f"{TABLE}dtype = 8\n", "dtype must be one or a list of float64"),
    "an unknown device": (
        f'{TABLE}device = ["cpu", "tpu"]\n',
        "device must be one or a list of cpu, cuda",
    ),
    "a date in quotes": (
        f'{TABLE}expires = "2030-01-01"\n',
        "expires must be a date such as 2030-12-31",
    ),
    "a call": (f"{TABLE}where = '__import__(\"os\")'\n", "may only compare"),
    "an attribute": (f"{TABLE}where = 'L.real == 1'\n", "may only compare"),
    "half an expression": (f"{TABLE}where = 'L =='\n", "is not an expression"),
    "an unknown field": (
        f"{TABLE}where = 'T == 0'\n",
        "a case has no T; it has B, L, S, .*, mode, .*, values, variant, .*$",
    ),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_message_says_what_is_invalid_and_where(what: str, tmp_path: Path) -> None:
    text, message = BAD_FILES[what]
    path = tmp_path / "waivers.toml"
    path.write_text(text)
    with pytest.raises(WaiverError, match=message) as raised:
        read_waivers(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clause": "MSK-99"}, "unknown clause"),
        ({"reason": ""}, "needs a reason"),
        ({"where": "len(L)"}, "may only compare"),
        ({"dtype": ("float8",)}, "dtype must be one"),
        ({"expires": "2030-12-31"}, "expires must be a date"),
    ],
)
def test_waiver_made_in_python_is_validated_too(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WaiverError, match=message):
        replace(KNOWN, **fields)


def test_written_waiver_is_read_back(tmp_path: Path) -> None:
    waiver = replace(
        KNOWN,
        url="u",
        dtype=("float16",),
        device=("cuda", "cpu"),
        where="L == 'ü\"'",
        error="\t\x7f",
        expires=TODAY,
    )
    (tmp_path / "w.toml").write_text(f"{waiver.to_toml()}\n{KNOWN.to_toml()}", encoding="utf-8")
    assert read_waivers(tmp_path / "w.toml") == [waiver, KNOWN]
    with pytest.raises(
        WaiverError, match="clauses of NanInEmptyRow, which is not judged in this run"
    ):
        read_waivers(tmp_path / "w.toml", ["other"])


def test_one_word_counts_as_a_list(tmp_path: Path) -> None:
    (tmp_path / "w.toml").write_text(f'{TABLE}dtype = "float16"\ndevice = "cuda"\n')
    (waiver,) = read_waivers(tmp_path / "w.toml")
    assert (waiver.dtype, waiver.device) == (("float16",), ("cuda",))


def test_waiver_of_the_docs_can_be_read(tmp_path: Path) -> None:
    docs = (DOCS / "how-to" / "waivers.md").read_text(encoding="utf-8")
    (tmp_path / "w.toml").write_text(
        docs.split("```toml\n[[waiver]]")[1].split("```")[0].join(["[[waiver]]", ""])
    )
    (waiver,) = read_waivers(tmp_path / "w.toml", ["my-attention"])
    assert waiver.partial
    assert waiver.expires == date(2030, 12, 31)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("L == 2", True),
        ("L != S and not causal", True),
        ("S * L > 7 or B == 1", True),
        ("mask in ('none', 'padding')", True),
        ("values == 'large' and mode == 'train'", True),
        ("regime == 'large' and path != 'eval'", True),  # as these fields were called before
        ("regime == 'normal'", False),
        ("mask < 1", False),
        ("L % 0 == 1", False),
        ("causal", False),
    ],
)
def test_predicates_compare_the_fields_of_a_case(text: str, holds: bool) -> None:
    validate_where(text)
    assert where_holds(text, Case(L=2, S=3, values="large", mode="train")) is holds


def test_waiver_is_not_stale_where_the_property_that_fails_is_too_slow_to_try() -> None:
    waiver = Waiver(implementation="WrongStridesCompiled", clause="CMP-1", reason="known")
    fault = registry.implementations["WrongStridesCompiled"]
    (verdict,) = check(fault, "quick", clauses="CMP-1", dtypes="float32", waivers=[waiver]).verdicts
    assert verdict.status == "pass", verdict.message
