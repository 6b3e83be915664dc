"""Only what is itself seen to fail blocks a failure; otherwise it has a message of its own."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mha.conformance import Report, Verdict, check, settings
from mha.conformance.cli.app import app
from mha.conformance.faults.hostile import leaves_out_empty_rows
from mha.conformance.reports.merge import merge
from mha.conformance.reports.text import summarise
from mha.conformance.results import settled
from support.front_end import QUICK, run
from support.reports_made import report, verdict

CLAUSES = ["SHP-1", "SHP-3", "HED-1", "MSK-8"]
COMMAND_QUICK = ("--dtype", "float32", "--profile", "quick")
TARGET = "mha.conformance.faults.hostile:leaves_out_empty_rows"
MESSAGE = "output_2.shape is (1, 0, 1), but should be (1, 1, 1)"
# Without the number of the call in the script.
BRIEF = MESSAGE.replace("output_2", "output")


def explained(clause: str, by: str, **given: Any) -> Verdict:
    """Return a failure that a clause or a family explains, as the judge returns it."""
    return verdict("x", clause, "fail", blocked_by=by, **given)


def statuses(*verdicts: Verdict) -> dict[str, str]:
    return {each.clause: each.status for each in settled(verdicts)}


def test_a_failure_is_blocked_by_what_fails() -> None:
    cause, other = verdict("x", "STA-1", "fail"), explained("NUM-1", "STA")
    assert statuses(cause, other) == {"STA-1": "fail", "NUM-1": "blocked"}
    assert statuses(verdict("x", "STA-1", "refused"), other)["NUM-1"] == "blocked"
    assert statuses(verdict("x", "STA-1", "waived"), other)["NUM-1"] == "blocked"
    assert (
        statuses(verdict("x", "HED-1", "fail"), explained("GRD-1", "HED-1"))["GRD-1"] == "blocked"
    )


@pytest.mark.parametrize(
    "cause",
    [
        verdict("x", "STA-1"),
        verdict("x", "STA-1", "harness_error"),
        verdict("x", "STA-1", "stale_waiver"),
        verdict("x", "STA-1", "not_claimed"),
        verdict("x", "STA-4", "fail", required=False),  # a SHOULD is no reason not to conform
        verdict("x", "STA-1", "fail", dtype="float64"),
        verdict("x", "STA-1", "fail", device="cuda"),
        verdict("y", "STA-1", "fail"),
        explained("STA-1", "SHP"),
        explained("SHP-1", "STA"),
    ],
)
def test_a_failure_is_not_blocked_by_what_is_not_seen_to_fail(cause: Verdict) -> None:
    failure = explained("NUM-1", "STA")
    assert settled([cause, failure])[1] == failure


def test_families_that_explain_each_other_both_fail() -> None:
    assert set(statuses(explained("STA-1", "SHP"), explained("SHP-1", "STA")).values()) == {"fail"}


def test_order_and_selection_do_not_matter() -> None:
    verdicts = [
        verdict("x", "STA-1", "fail"),
        explained("NUM-1", "STA"),
        explained("GRD-1", "HED-1"),
        verdict("x", "HED-1"),
    ]
    expected = {"STA-1": "fail", "NUM-1": "blocked", "GRD-1": "fail", "HED-1": "pass"}
    for order in itertools.permutations(verdicts):
        assert statuses(*order) == expected
    assert statuses(*verdicts[1:])["NUM-1"] == "fail"


def test_shards_are_settled_when_they_are_merged() -> None:
    cause, failure = verdict("x", "STA-1", "fail"), explained("NUM-1", "STA")
    whole = report(*settled([failure, cause]))
    alone, shared = report(*settled([failure])), report(*settled([cause, failure]))
    assert [each.status for each in alone.verdicts] == ["fail"]
    for shards in ([alone, report(cause)], [report(cause), alone], [shared, alone]):
        assert merge(shards).verdicts == whole.verdicts


def test_report_of_an_earlier_version_is_settled_when_it_is_read() -> None:
    blocked = replace(explained("NUM-1", "STA"), status="blocked")
    for verdicts, status in (
        ([blocked], "fail"),
        (
            [blocked, verdict("x", "STA-1", "fail")],
            "blocked",
        ),
    ):
        assert Report.from_json(report(*verdicts).to_json()).verdicts[0].status == status


def test_a_class_that_is_wrong_only_for_certain_masks_fails_with_a_reason() -> None:
    found = check(leaves_out_empty_rows, "quick", clauses=CLAUSES, dtypes=["float32"])
    by_clause = {each.clause: each for each in found.verdicts}
    failure = by_clause.pop("MSK-8")
    assert {each.status for each in by_clause.values()} == {"pass"}
    assert (failure.status, failure.blocked_by, failure.message) == ("fail", "SHP", MESSAGE)
    assert str(failure.case).startswith("Case(mask='empty_")
    with pytest.raises(AssertionError):
        exec(compile(str(failure.script), "script", "exec"), {})
    assert f"fail            MSK-8   float32: {BRIEF}" in summarise(found.verdicts)


def test_command_gives_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = [word for clause in CLAUSES for word in ("--clause", clause)]
    in_full = CliRunner().invoke(app, ["check", TARGET, *COMMAND_QUICK, *options]).output
    assert in_full.count("MSK-8 (MUST): Empty rows follow one declared policy") == 1
    assert MESSAGE in in_full
    assert "To reproduce it" in in_full
    assert "blocked" not in in_full
    some = {
        clause: members for clause, members in settings.properties().items() if clause in CLAUSES
    }
    monkeypatch.setattr(settings, "properties", lambda: some)
    assert (
        f"\nfail            MSK-8   float32: {BRIEF}"
        in CliRunner().invoke(app, ["check", TARGET, *COMMAND_QUICK]).output
    )


def test_command_is_brief_about_what_is_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    some = {clause: settings.properties()[clause] for clause in ("SHP-1", "NUM-1", "STA-1")}
    monkeypatch.setattr(settings, "properties", lambda: some)
    target = "mha.conformance.faults.state:faulty_ScalesQueryInPlace"
    output = CliRunner().invoke(app, ["check", target, *COMMAND_QUICK]).output
    assert re.findall(r"^(\w+) +([A-Z]{3}-\d+)", output, re.MULTILINE) == [("fail", "STA-1")]
    assert "\n    blocked by STA (which the same calls fail): SHP-1, NUM-1\n" in output
    assert "DOES NOT CONFORM: " in output


def test_pytest_gives_the_reason() -> None:
    """Blocked items fail too, but only once the run ends is it known that they are blocked."""
    done = run("-k", "SHP-1 or SHP-3 or MSK-8", "--mha-impl", TARGET, *QUICK)
    assert done.returncode == 1
    assert f"message    {MESSAGE}" in done.stdout
    assert "To reproduce it" in done.stdout
    assert (
        "fail            MSK-8   float32: output.shape is (1, 0, 1), but should be" in done.stdout
    )
    assert "blocked" not in done.stdout


@pytest.mark.slow
def test_pytest_is_brief_about_what_is_blocked() -> None:
    target = "mha.conformance.faults.state:faulty_ScalesQueryInPlace"
    done = run("-k", "SHP-1 or NUM-1 or STA-1", "-n", "2", "--mha-impl", target, *QUICK)
    assert done.returncode == 1
    failures, _, _ = done.stdout.partition(
        "short test summary info"
    )  # repeats the messages where CI is set
    assert failures.count("blocked by STA, which fails too: start there") == 2
    assert failures.count("To reproduce it") == 1
    assert "    blocked by STA (which the same calls fail): SHP-1, NUM-1" in done.stdout
