"""What a search counts: cases that say nothing, and cases that would say the same of a wrong answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mha.conformance import check
from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import Domain
from mha.conformance.engine.search import PROFILES, Search
from mha.conformance.faults import registry as faults
from mha.conformance.harness.assertions import assume, expect_close
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import Property, properties
from mha.conformance.reports.text import summarise
from mha.conformance.results import Report


def never_looks(session: Session, case: Case) -> None:
    session(case.problem())


def looks(session: Session, case: Case) -> None:
    problem = case.problem()
    expect_close(session(problem).output, session.expected(problem).output, because="the oracle")


def looks_at_many_keys(session: Session, case: Case) -> None:
    assume(case.S > 2, "there are few keys")
    looks(session, case)


def needs_the_impossible(session: Session, case: Case) -> None:
    assume(False, "nothing is ever so")


def made_property(check: object, **options: object) -> Property:
    """Return a property that is registered nowhere."""
    model = properties()["NUM-1"][0]
    found = replace(
        model, name=getattr(check, "__name__", ""), check=check, domain=Domain(), requires=None, min_rejection_rate=0.5
    )
    return replace(found, **options)


def searched(prop: Property) -> Search:
    claims = faults.complete.claims
    domain = prop.within(claims, "float32")
    assert isinstance(domain, Domain)
    search = Search(faults.complete, prop, domain, "float32", "cpu", PROFILES["quick"], 0)
    search.run(lambda: True)
    assert search.failure is None
    return search


def judged(prop: Property, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.setattr("mha.conformance.engine.judge.properties", lambda: {"NUM-1": (prop,)})
    return check(faults.complete, "quick", clauses=["NUM-1"], dtypes=["float32"])


def test_a_property_that_rejects_nothing_is_seen_through(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, full = (made_property(check, must_reject=("zeros", "noise")) for check in (never_looks, looks))
    told = "0 of 24 cases reject the known wrong answers zeros, noise: a share of 0.5 is the least"
    assert searched(empty).sensitivity.found == told
    assert searched(full).sensitivity.found == ""
    report = judged(empty, monkeypatch)
    assert report.verdicts[0].status == "harness_error"
    assert told in report.verdicts[0].message
    assert not report.conforms
    assert "COULD NOT BE JUDGED" in summarise(report.verdicts)[0]


def test_what_was_rejected_is_counted_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    report = judged(made_property(looks, must_reject=("zeros", "noise")), monkeypatch)
    rejected = report.verdicts[0].rejected
    assert set(rejected) == {"zeros", "zeros tried", "noise", "noise tried"}
    assert rejected["zeros"] == rejected["zeros tried"] >= 2
    assert "self-test: 100% of " in summarise(report.verdicts)[-1]


def test_a_share_that_is_too_small_for_its_floor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a mask, the unmasked answer is right.
    half = made_property(looks, must_reject=("unmasked", "zeros"), min_rejection_rate=0.99)
    assert searched(half).sensitivity.rejected["zeros"] == searched(half).sensitivity.rejected["unmasked tried"]
    assert not searched(half).sensitivity.rejected["unmasked"]
    assert judged(half, monkeypatch).verdicts[0].status == "harness_error"
    none = judged(replace(half, min_rejection_rate=0.5), monkeypatch).verdicts[0]
    assert none.status == "harness_error"
    assert "cases rejects the known wrong answer unmasked" in none.message


def test_cases_that_say_nothing_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    every, some = searched(made_property(looks)), searched(made_property(looks_at_many_keys))
    assert 0 < some.examples < every.examples
    assert all(case.S > 2 for case in some.tried)
    assert some.left_out == "there are few keys"
    verdict = judged(made_property(needs_the_impossible), monkeypatch).verdicts[0]
    assert (verdict.status, verdict.examples, verdict.message) == ("not_claimed", 0, "nothing is ever so")


def test_limit_holds_in_each_phase() -> None:
    assert searched(made_property(looks, max_cases=3)).examples <= 6


def test_the_lowest_floor_is_one() -> None:
    lowest = min(prop.min_rejection_rate for members in properties().values() for prop in members)
    assert searched(made_property(never_looks, must_reject=("zeros",), min_rejection_rate=lowest)).sensitivity.found


@pytest.mark.parametrize(
    ("claimed", "profile", "share"),
    [({"float32", "float64"}, "default", 2), ({"float64"}, "default", 1), ({"float32", "float64"}, "quick", 1)],
)
def test_float64_takes_half_of_the_cases_where_float32_has_all(claimed: set[str], profile: str, share: int) -> None:
    claims = replace(faults.correct.claims, dtypes=claimed)
    prop = made_property(never_looks, must_reject=())
    counts = {}
    for dtype in ("float32", "float64"):
        domain = prop.within(claims, dtype)
        assert isinstance(domain, Domain)
        implementation = replace(faults.correct, claims=claims)
        search = Search(implementation, prop, domain, dtype, "cpu", PROFILES[profile], 0)
        search.run(lambda: False)
        counts[dtype] = search.examples
    assert counts["float64"] == pytest.approx(counts["float32"] / share, abs=1)
