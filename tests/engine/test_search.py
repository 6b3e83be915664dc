"""The search for a failure: its budget, discarded cases, shrinking, and what cases prove."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mha.conformance import check
from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import Domain
from mha.conformance.cases.space import CaseSpace
from mha.conformance.engine.property_run import run_property
from mha.conformance.engine.search import (
    Budget,
    Failure,
    PropertyResult,
    Search,
    told_at_once,
)
from mha.conformance.engine.sensitivity import Outcome, outcome
from mha.conformance.faults import registry as faults
from mha.conformance.harness.assertions import assume, expect, expect_close
from mha.conformance.harness.known_bad.answers import REJECTED
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import Property, PropertyFunction, properties
from mha.conformance.results import Report
from mha.conformance.settings import Settings
from mha.conformance.waivers import Waiver
from mha.implementations import resolve
from mha.spec import Scores

QUICK = Settings(profile="quick", dtypes=("float32",))


def asserts_nothing(session: Session, case: Case) -> None:
    session(case.problem())


def compares_with_the_oracle(session: Session, case: Case) -> None:
    problem = case.problem()
    expect_close(
        session(problem).output, session.expected(problem).output, because="the oracle's value"
    )


def compares_one_head(session: Session, case: Case) -> None:
    if case.n_heads == 1:
        compares_with_the_oracle(session, case)
    else:
        asserts_nothing(session, case)


def finds_zeros(session: Session, case: Case) -> None:
    expect(bool(session(case.problem()).output.tensor.any()), "every number is zero")


def discards_few_keys(session: Session, case: Case) -> None:
    assume(case.S > 2, "there are too few keys")
    compares_with_the_oracle(session, case)


def discards_everything(session: Session, case: Case) -> None:
    assume(False, "this never holds")


def fails_for_three_queries(session: Session, case: Case) -> None:
    expect(case.L < 3 or case.n_heads < 2, "three queries of two heads", "assert False")


def raises_an_exception(session: Session, case: Case) -> None:
    raise ZeroDivisionError("in the property")


def made_property(function: PropertyFunction, **fields: object) -> Property:
    """Return a property that is not registered."""
    model = properties()["NUM-1"][0]
    made = replace(model, name=function.__name__, function=function, domain=Domain(), requires=None)
    return replace(made, **{"min_rejection_rate": 0.5, **fields})


def searched(prop: Property, waivers: tuple[Waiver, ...] = ()) -> Search:
    """Return a search for failures of a correct implementation, after its run."""
    domain = prop.within(faults.complete.claims, "float32")
    assert isinstance(domain, Domain)
    space = CaseSpace(domain, faults.complete.claims, "float32", "cpu", QUICK.limits.longest)
    search = Search(
        faults.complete, prop, space, Budget.of(prop, QUICK.limits), seed=0, waivers=waivers
    )
    search.run()
    return search


def judged(prop: Property, monkeypatch: pytest.MonkeyPatch) -> Report:
    """Return the report on a correct implementation where the property is the only one of NUM-1."""
    monkeypatch.setattr("mha.conformance.engine.judge.properties", lambda: {"NUM-1": (prop,)})
    return check(faults.complete, "quick", clauses=["NUM-1"], dtypes=["float32"])


def test_property_that_rejects_no_known_bad_answer_is_a_harness_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    insensitive, sensitive = (
        made_property(function, must_reject=("zeros", "lopsided"))
        for function in (asserts_nothing, compares_with_the_oracle)
    )
    assert searched(sensitive).sensitivity.problem == ""
    problem = searched(insensitive).sensitivity.problem
    assert (
        problem
        == "only 0 of 48 cases reject the known-bad answers zeros, lopsided; at least 50% must"
    )
    report = judged(insensitive, monkeypatch)
    assert report.verdicts[0].status == "harness_error"
    assert problem in report.verdicts[0].message
    assert not report.conforms


def test_rejections_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    report = judged(
        made_property(compares_with_the_oracle, must_reject=("zeros", "lopsided")), monkeypatch
    )
    rejections = report.verdicts[0].rejections
    assert set(rejections) == {"zeros", "lopsided"}
    assert rejections["zeros"].rejected == rejections["zeros"].tried >= 2


def test_rejection_rate_below_the_least_is_a_harness_error(monkeypatch: pytest.MonkeyPatch) -> None:
    prop = made_property(compares_one_head, must_reject=("zeros",), min_rejection_rate=0.9)
    rejections = searched(prop).sensitivity.rejections["zeros"]
    assert 0 < rejections.rejected < rejections.tried
    assert judged(prop, monkeypatch).verdicts[0].status == "harness_error"


def test_known_bad_answer_is_not_counted_where_it_is_right() -> None:
    prop = made_property(
        compares_with_the_oracle, must_reject=("unmasked",), domain=Domain(masks=("none", "keys"))
    )
    sensitivity = searched(prop).sensitivity
    assert sensitivity.right
    rejections = sensitivity.rejections["unmasked"]
    assert rejections.rejected == rejections.tried > 0
    assert not sensitivity.problem


@pytest.mark.parametrize(
    ("mask", "reads_empty_rows", "expected"),
    [
        ("empty_item", True, Outcome.MISSED),
        ("empty_item", False, Outcome.RIGHT),
        ("keys", False, Outcome.MISSED),
    ],
)
def test_rows_without_a_key_count_where_the_property_reads_them(
    mask: str, reads_empty_rows: bool, expected: Outcome
) -> None:
    prop = made_property(asserts_nothing, reads_empty_rows=reads_empty_rows)
    case = Case(mask=mask, B=1, L=3, S=3)  # the only item is empty
    assert outcome(prop, faults.complete.claims, case, REJECTED["lopsided"]) is expected


def test_merges_of_parts_prove_nothing_where_no_row_has_a_key() -> None:
    prop = properties()["LSE-2"][0]
    claims = resolve("kernel_loop")[0].implementation.claims
    case = Case(mask="empty_item", B=1, L=3, S=3, projected=False, return_lse=True)
    assert outcome(prop, claims, case, REJECTED["lopsided"]) is Outcome.RIGHT
    for seen in (replace(case, B=2), replace(case, mask="keys")):
        assert outcome(prop, claims, seen, REJECTED["lopsided"]) is Outcome.REJECTED


def test_known_bad_answers_that_are_always_right_are_a_harness_error() -> None:
    # There are no masks.
    problem = searched(
        made_property(compares_with_the_oracle, must_reject=("unmasked",))
    ).sensitivity.problem
    assert problem.startswith("the known-bad answers unmasked are right in all of ")


def test_to_ignore_masks_is_right_where_none_are_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    prop = made_property(
        compares_with_the_oracle, must_reject=("unmasked", "zeros"), min_rejection_rate=0.99
    )
    monkeypatch.setattr("mha.conformance.engine.judge.properties", lambda: {"NUM-1": (prop,)})
    claims = replace(faults.complete.claims, masks=set(), causal=None, scores=Scores())
    maskless = faults.implementation_of(faults.Complete, claims)
    (verdict,) = check(maskless, "quick", clauses=["NUM-1"], dtypes=["float32"]).verdicts
    assert verdict.status == "pass", verdict.message
    assert set(verdict.rejections) == {"zeros"}


def test_known_bad_answers_are_tried_on_the_cpu_whatever_the_device() -> None:
    prop = made_property(compares_with_the_oracle, must_reject=("zeros",))
    case = Case(device="cuda", mask="keys", S=3)
    assert outcome(prop, faults.complete.claims, case, REJECTED["zeros"]) is Outcome.REJECTED


def test_a_single_known_bad_answer_that_is_never_rejected_is_a_harness_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    domain = Domain(masks=("keys", "padding"), min_S=2)
    prop = made_property(
        finds_zeros, must_reject=("unmasked", "zeros"), min_rejection_rate=0.25, domain=domain
    )
    verdict = judged(prop, monkeypatch).verdicts[0]
    assert verdict.status == "harness_error"
    assert "reject the known-bad answer unmasked" in verdict.message


def test_lowest_registered_rejection_rate_can_still_be_missed() -> None:
    lowest = min(prop.min_rejection_rate for members in properties().values() for prop in members)
    prop = made_property(asserts_nothing, must_reject=("zeros",), min_rejection_rate=lowest)
    assert searched(prop).sensitivity.problem


def test_discarded_cases_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    every, some = (
        searched(made_property(compares_with_the_oracle)),
        searched(made_property(discards_few_keys)),
    )
    assert 0 < len(some.cases) < len(every.cases)
    assert all(case.S > 2 for case in some.cases)
    assert some.discard_reason == "there are too few keys"
    verdict = judged(made_property(discards_everything), monkeypatch).verdicts[0]
    assert (verdict.status, verdict.examples, verdict.message) == (
        "not_claimed",
        0,
        "this never holds",
    )


def test_max_cases_limits_both_phases() -> None:
    assert len(searched(made_property(compares_with_the_oracle, max_cases=3)).cases) == 3 + 2


def test_smoke_tries_a_single_boundary_case_and_no_known_bad_answer() -> None:
    verdict = check(faults.correct, "smoke", clauses="SHP-3", dtypes="float32").verdicts[0]
    assert (verdict.status, verdict.examples, verdict.rejections) == ("pass", 1, {})


def test_failure_is_shrunk() -> None:
    result = searched(made_property(fails_for_three_queries)).result()
    assert result.failure is not None
    assert result.ends
    session, violation = result.failure
    assert (session.case.B, session.case.L, session.case.seed) == (1, 3, 0)
    assert violation.message == "three queries of two heads"
    assert 1 <= result.cases_to_failure <= len(result.cases)
    assert not result.harness_error


def test_waiver_that_covers_every_failure_ends_the_search() -> None:
    waiver = Waiver(implementation="Complete", clause="NUM-1", reason="known")
    result = searched(made_property(fails_for_three_queries), waivers=(waiver,)).result()
    assert result.fully_waived
    assert result.ends
    assert result.failure is None
    assert list(result.waived) == [waiver]


def test_waiver_of_some_cases_leaves_the_others() -> None:
    waiver = Waiver(implementation="Complete", clause="NUM-1", reason="known", where="L == 3")
    result = searched(made_property(fails_for_three_queries), waivers=(waiver,)).result()
    assert list(result.waived) == [waiver]
    assert not result.fully_waived
    assert result.failure is not None
    assert result.failure[0].case.L > 3


def test_exception_of_a_property_is_a_harness_error() -> None:
    result = run_property(
        faults.complete, made_property(raises_an_exception), "float32", "cpu", QUICK
    )
    assert "raises_an_exception: ZeroDivisionError('in the property')" in result.harness_error
    assert "Traceback" in result.harness_error
    assert result.ends


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"needs": ("empty_row=nan|error",)}, "needs the claim empty_row=nan|error"),
        ({"domain": Domain(dtypes=("float16", "bfloat16"))}, "applies to float16, bfloat16 only"),
    ],
)
def test_property_without_cases_is_not_applicable(fields: dict[str, object], reason: str) -> None:
    prop = made_property(compares_with_the_oracle, **fields)
    result = run_property(faults.complete, prop, "float32", "cpu", QUICK)
    assert str(result.not_applicable) == reason
    assert result == PropertyResult(prop=prop, not_applicable=result.not_applicable)
    assert not result.ends


def test_long_rows_in_bfloat16_tell_known_bad_answers_apart() -> None:
    # A seed with which few cases do.
    (verdict,) = check("sdpa", seed=7, clauses="NUM-5", dtypes=["bfloat16"]).verdicts
    assert verdict.status == "pass", verdict.message
    assert verdict.rejections["mean"].rejected
    assert verdict.rejections["lopsided"].rejected


def test_the_first_failure_is_told_once_and_before_it_is_made_simpler() -> None:
    told = list[Case]()

    def hears(prop: Property, failure: Failure) -> None:
        told.append(failure[0].case)

    prop = made_property(fails_for_three_queries)
    with told_at_once(hears):
        search = searched(prop)
    assert search.failure is not None
    assert len(told) == 1
    assert told != [search.failure[0].case]
    searched(prop)
    assert len(told) == 1
