"""How the results of a clause's properties add up to a verdict, on made-up results."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from functools import partial
from typing import Any

import pytest

from mha.conformance import check
from mha.conformance.cases.case import Case
from mha.conformance.cases.reasons import NeedsClaim
from mha.conformance.engine import verdicts
from mha.conformance.engine.preconditions import FailedPrecondition
from mha.conformance.engine.search import Failure, PropertyResult
from mha.conformance.faults import registry as faults
from mha.conformance.harness.errors import CallRaised, Violation
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import Property, properties
from mha.conformance.results import Rejections, Verdict
from mha.conformance.settings import Settings
from mha.conformance.waivers import Waiver
from mha.spec import CLAUSES

verdict_of = partial(verdicts.verdict_of, requires=Settings().requires)

SOME_CASES = (Case(), Case(L=2), Case(L=3))


def untested(clause: str = "MSK-8") -> Verdict:
    """Return what is known of a verdict before any property runs."""
    level = CLAUSES[clause].level
    return Verdict(
        implementation="Correct",
        clause=clause,
        level=level,
        dtype="float32",
        device="cpu",
        status="pass",
    )


def prop_of(clause: str = "MSK-8", number: int = 1) -> Property:
    return next(prop for prop in properties()[clause] if prop.number == number)


def failure_of(violation: Violation, case: Case = SOME_CASES[1]) -> Failure:
    return Session(faults.correct, case), violation


def failed(violation: Violation, prop: Property | None = None, **fields: Any) -> PropertyResult:
    """Return the result of a property that failed on the second of its cases."""
    known = {
        "prop": prop or prop_of(),
        "cases": SOME_CASES,
        "failure": failure_of(violation),
        "cases_to_failure": 2,
    }
    return PropertyResult(**known | fields)


def waiver_of(reason: str = "known", **fields: Any) -> Waiver:
    return Waiver(implementation="Correct", clause="MSK-8", reason=reason, **fields)


def passed(**fields: Any) -> PropertyResult:
    """Return the result of a property that passed."""
    return PropertyResult(**{"prop": prop_of(), "cases": SOME_CASES, "margin": 0.25} | fields)


def test_results_without_failure_pass_and_are_added_up() -> None:
    zeros, more_zeros = (
        {"zeros": Rejections(1, 2)},
        {
            "zeros": Rejections(3, 3),
            "noise": Rejections(1, 1),
        },
    )
    results = [
        passed(rejections=zeros),
        passed(cases=SOME_CASES[:1], margin=0.75, rejections=more_zeros),
    ]
    verdict = verdict_of(untested(), results, [])
    assert (verdict.status, verdict.examples, verdict.margin) == ("pass", 4, 0.75)
    assert verdict.rejections == {"noise": Rejections(1, 1), "zeros": Rejections(4, 5)}
    assert verdict.conforms


def test_no_cases_are_not_claimed() -> None:
    needs = PropertyResult(prop=prop_of(), not_applicable=NeedsClaim("masks"))
    discarded = PropertyResult(prop=prop_of(number=2), discard_reason="every row is empty")
    verdict = verdict_of(untested(), [needs, discarded, needs], [])
    assert verdict.status == "not_claimed"
    assert verdict.message == "needs the claim masks; every row is empty"
    assert verdict_of(untested(), [needs, passed()], []).status == "pass"


def test_a_failure_is_reported_with_its_case_and_property() -> None:
    results = [passed(), failed(Violation("off by one", ("assert False",)), note="and so on")]
    verdict = verdict_of(untested(), results, [], target="somewhere.py:thing")
    assert (verdict.status, verdict.violated) == ("fail", "empty_rows_follow_the_declared_policy")
    assert (verdict.case, verdict.message) == ("Case(L=2)", "off by one; and so on")
    assert (verdict.examples, verdict.cases_to_failure) == (6, 3 + 2)
    assert verdict.script is not None
    assert verdict.script.rstrip().endswith("assert False")
    assert not verdict.conforms


def test_a_failed_property_of_a_recommendation_is_required_in_a_strict_run_only() -> None:
    should = prop_of(number=4)
    assert should.level == "SHOULD"
    results = [failed(Violation("not zeros"), should)]
    relaxed, strict, required = (
        verdict_of(untested(), results, [], requires=settings.requires)
        for settings in (Settings(), Settings(strict=True), Settings(require=(should.clause,)))
    )
    assert required == strict
    assert (relaxed.status, relaxed.level, relaxed.conforms) == ("fail", "SHOULD", True)
    assert (strict.status, strict.level, strict.conforms) == ("fail", "SHOULD", False)


@pytest.mark.parametrize(
    ("error", "status"), [(NotImplementedError("not yet"), "refused"), (RuntimeError("oh"), "fail")]
)
def test_not_implemented_is_refused(error: Exception, status: str) -> None:
    verdict = verdict_of(untested(), [failed(CallRaised("the call raised", error))], [])
    assert verdict.status == status


def test_a_failed_precondition_explains_a_failure() -> None:
    precondition = FailedPrecondition(
        "HED-1", "a plain call fails HED-1: output_2[0] is 1, but should be 2"
    )
    verdict = verdict_of(untested(), [failed(Violation("off"), blocked_by=precondition)], [])
    assert (verdict.status, verdict.blocked_by) == ("fail", "HED-1")
    assert verdict.message == f"off [{precondition.message}]"
    assert verdict.case == "Case(L=2)"
    assert not verdict.conforms


def test_a_violation_of_another_family_is_explained_by_it() -> None:
    violation = Violation("the call changed its query in place", family="STA")
    verdict = verdict_of(untested(), [failed(violation)], [])
    assert (verdict.status, verdict.blocked_by, verdict.message) == (
        "fail",
        "STA",
        violation.message,
    )
    own = Violation("a mask", family="MSK")
    assert verdict_of(untested(), [failed(own)], []).blocked_by is None


def test_a_violation_of_another_family_fails_in_a_variant() -> None:
    """Nothing else has built the variant, so the clause of the other family may pass."""
    verdict = verdict_of(
        untested("GQA-1"), [failed(Violation("the shape", family="SHP"), prop_of("GQA-1"))], []
    )
    assert (verdict.status, verdict.blocked_by) == ("fail", None)


def test_a_harness_error_is_reported_unless_a_property_failed() -> None:
    broken = passed(harness_error="some_property: only 0 of 24 cases")
    verdict = verdict_of(untested(), [passed(), broken], [])
    assert (verdict.status, verdict.message) == ("harness_error", broken.harness_error)
    assert verdict_of(untested(), [broken, failed(Violation("off"))], []).status == "fail"


def test_a_waived_failure_conforms() -> None:
    waiver = waiver_of("it is known")
    results = [passed(waived={waiver: failure_of(Violation("off"))}, fully_waived=True)]
    verdict = verdict_of(untested(), results, [waiver])
    assert (verdict.status, verdict.case, verdict.violated) == (
        "waived",
        "Case(L=2)",
        results[0].prop.name,
    )
    assert verdict.message == "off [waived: it is known]"
    assert verdict.conforms


def test_a_failure_outside_its_waiver_fails() -> None:
    verdict = verdict_of(
        untested(), [failed(Violation("off"))], [waiver_of("it is known", where="L == 9")]
    )
    assert verdict.status == "fail"
    assert "not covered by its waiver: it is known" in verdict.message


def test_a_waiver_is_stale_where_nothing_fails() -> None:
    verdict = verdict_of(
        untested("SHP-5"), [passed(prop=prop_of("SHP-5"))], [waiver_of("it is known")]
    )
    assert (verdict.status, verdict.required, verdict.conforms) == ("stale_waiver", True, False)
    assert "delete its waiver: it is known" in verdict.message


def test_a_waiver_is_stale_where_nothing_is_judged() -> None:
    result = PropertyResult(prop=prop_of(), not_applicable=NeedsClaim("masks"))
    verdict = verdict_of(untested(), [result], [waiver_of()])
    assert verdict.status == "stale_waiver"
    assert "needs the claim masks" in verdict.message


def test_a_partial_waiver_is_stale_only_if_its_cases_were_tried() -> None:
    tried, other = waiver_of(where="L == 2"), waiver_of(where="L == 9")
    assert verdict_of(untested(), [passed()], [tried]).status == "stale_waiver"
    verdict = verdict_of(untested(), [passed()], [other])
    assert (verdict.status, verdict.message) == ("pass", "no case matches its waiver: L == 9")


def test_few_cases_do_not_make_a_waiver_stale() -> None:
    for waiver in (waiver_of("it is known"), waiver_of("it is known", where="L == 2")):
        verdict = verdict_of(untested(), [passed()], [waiver], few=True)
        assert (verdict.status, verdict.message) == (
            "pass",
            "no case that was tried needs its waiver: it is known",
        )
    unclaimed = PropertyResult(prop=prop_of(), not_applicable=NeedsClaim("masks"))
    assert verdict_of(untested(), [unclaimed], [waiver_of()], few=True).status == "stale_waiver"


def test_an_expired_waiver_waives_nothing() -> None:
    expired = waiver_of("it was known", expires=date(2020, 1, 1))
    passing = check(
        faults.correct, "quick", clauses=["MSK-8"], dtypes=["float32"], waivers=[expired]
    ).verdicts[0]
    assert passing.status == "stale_waiver"
    assert "expired on 2020-01-01: it was known" in passing.message
    waiver = replace(expired, implementation="FiniteFill")
    finite_fill = faults.implementations["FiniteFill"]
    failing = check(
        finite_fill, "quick", clauses=["MSK-8"], dtypes=["float32"], waivers=[waiver]
    ).verdicts[0]
    assert failing.status == "fail"
    assert "expired on 2020-01-01: it was known" in failing.message
