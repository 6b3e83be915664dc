"""The judge: verdicts on claims, failures and broken implementations, and how the results of properties add up."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from datetime import date
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.conformance import check
from mha.conformance.cases.case import Case
from mha.conformance.engine import judge
from mha.conformance.engine.preconditions import FailedPrecondition
from mha.conformance.engine.search import Failure, PropertyResult
from mha.conformance.faults import registry as faults
from mha.conformance.harness.errors import CallRaised, Violation
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import Property, properties
from mha.conformance.reports.text import describe, summarise
from mha.conformance.results import VOLATILE, Rejections, Report, Verdict
from mha.conformance.settings import Settings
from mha.conformance.waivers import Waiver
from mha.spec import CLAUSES, Claims, Config, Output, Weights

verdict_of = partial(judge.verdict_of, requires=Settings().requires)


def test_properties_belong_to_clauses_and_have_unique_names() -> None:
    names = [prop.name for members in properties().values() for prop in members]
    assert len(names) == len(set(names))
    assert set(properties()) <= set(CLAUSES)


class Recorder:
    """A correct implementation that hashes its inputs."""

    name = "recorder"

    def __init__(self) -> None:
        self.inner = faults.correct
        self.claims: Claims = self.inner.claims
        self.digest = hashlib.sha256()

    def build(self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str) -> Any:
        inner = self.inner.build(config, weights, dtype=dtype, device=device)
        recorder = self

        class Attention:
            train, eval = inner.train, inner.eval

            def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Output:
                for tensor in (query, key, value):
                    recorder.digest.update(tensor.detach().contiguous().numpy().tobytes())
                recorder.digest.update(repr(sorted(options.items(), key=str)).encode())
                return inner(query, key, value, **options)

        return Attention()


def without_volatile_fields(report: Report) -> Any:
    """Return the JSON of a report, without what may differ between two runs with the same seed."""
    data = json.loads(report.to_json())
    for part in (data, *data["verdicts"]):
        for name in VOLATILE:
            part.pop(name, None)
    return data


def test_one_seed_gives_the_same_inputs_and_report() -> None:
    runs = []
    for seed in (3, 3, 4):
        recorder = Recorder()
        report = check(recorder, "quick", seed, clauses=["MSK-1", "EQV-1", "NUM-1"], dtypes=["float32"])
        assert report.conforms
        runs.append((recorder.digest.hexdigest(), without_volatile_fields(report)))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]


def test_report_has_a_verdict_for_each_clause_and_dtype() -> None:
    report = check(faults.correct, "quick", clauses=["CFG-1", "CAU-2"])
    data = json.loads(report.to_json())
    assert data["conforms"] is True
    pairs = {(verdict["clause"], verdict["dtype"]) for verdict in data["verdicts"]}
    assert pairs == {(clause, dtype) for clause in ("CFG-1", "CAU-2") for dtype in ("float32", "float64")}
    assert all(verdict["examples"] > 10 for verdict in data["verdicts"])


@pytest.mark.parametrize("profile", ["quick", "default"])
def test_float64_takes_fewer_cases_where_float32_runs_too(profile: str) -> None:
    def examples(claimed: set[str], dtypes: list[str]) -> int:
        claims = replace(faults.correct.claims, dtypes=claimed)
        implementation = replace(faults.correct, claims=claims)
        verdicts = check(implementation, profile, clauses=["SHP-3"], dtypes=dtypes).verdicts
        return next(verdict.examples for verdict in verdicts if verdict.dtype == "float64")

    both, single = ["float32", "float64"], ["float64"]
    every_case = examples(set(both), single)
    assert every_case > 20
    assert examples(set(single), both) == every_case
    fewer = every_case // 2 if profile != "thorough" else every_case
    assert examples(set(both), both) == pytest.approx(fewer, abs=1)


def test_unclaimed_clauses_are_not_judged() -> None:
    modest = replace(faults.correct, claims=Claims(causal=None, returns_weights=False, dtypes={"float32"}))
    report = check(modest, "quick", clauses=["CAU-2", "SHP-2", "CFG-1"], dtypes=["float32", "float64"])
    verdicts = {(v.clause, v.dtype): (v.status, v.message) for v in report.verdicts}
    assert verdicts["CAU-2", "float32"] == ("not_claimed", "needs the claim causal")
    assert verdicts["SHP-2", "float32"] == ("not_claimed", "needs the claim returns_weights")
    assert verdicts["CFG-1", "float32"][0] == "pass"
    status, message = verdicts["CFG-1", "float64"]
    assert status == "not_claimed"
    assert "float64 on cpu is not claimed" in message
    assert report.conforms


def test_claimed_but_not_implemented_is_refused() -> None:
    class NoMasks(faults.Correct):
        def allow(self, mask: torch.Tensor | None, *rest: Any) -> torch.Tensor:
            if mask is not None:
                raise NotImplementedError("no masks yet")
            return super().allow(mask, *rest)

    (verdict,) = check(faults.implementation_of(NoMasks), clauses=["MSK-4"], dtypes=["float32"]).verdicts
    assert verdict.status == "refused"
    assert "no masks yet" in verdict.message
    assert not verdict.conforms


def test_an_exception_is_a_failure() -> None:
    class RaisesForTwoQueries(faults.Correct):
        def merge(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[2] == 2:  # the plain case has another length, or the clause would be blocked
                raise RuntimeError("two are too many")
            return super().merge(x)

    (verdict,) = check(faults.implementation_of(RaisesForTwoQueries), clauses=["NUM-1"], dtypes=["float32"]).verdicts
    assert verdict.status == "fail"
    assert re.fullmatch(
        r"the call raised RuntimeError: two are too many \(test_judge.py, line \d+ in merge\)", verdict.message
    )
    assert verdict.case is not None
    assert "L=2" in verdict.case


def test_a_result_that_depends_on_earlier_calls_is_a_failure() -> None:
    class OffEverySeventhCall(faults.Correct):
        calls = 0

        def merge(self, x: torch.Tensor) -> torch.Tensor:
            type(self).calls += 1
            return super().merge(x) * (1.5 if type(self).calls % 7 == 0 else 1.0)

    (verdict,) = check(faults.implementation_of(OffEverySeventhCall), clauses=["NUM-1"], dtypes=["float32"]).verdicts
    assert verdict.status == "fail"


@pytest.mark.parametrize("returned", [None, 3, (1, 2, 3), Output("text", None)])  # type: ignore[arg-type]  # on purpose
def test_an_invalid_result_is_a_failure(returned: Any) -> None:
    class ReturnsInvalid(faults.Correct):
        def forward(self, *inputs: Any, mask: Any = None, is_causal: bool = False) -> Any:
            return returned

    (verdict,) = check(faults.implementation_of(ReturnsInvalid), clauses=["SHP-1"], dtypes=["float32"]).verdicts
    assert verdict.status == "fail"
    assert "should return Output" in verdict.message


def test_an_exception_of_the_judge_is_a_harness_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("in the judge")

    monkeypatch.setattr("mha.conformance.harness.oracle_answers.oracle", broken)
    report = check(faults.correct, clauses=["NUM-1"], dtypes=["float32"])
    assert report.verdicts[0].status == "harness_error"
    assert "in the judge" in report.verdicts[0].message
    assert not report.conforms


def test_a_failure_is_described_with_everything_that_a_reader_needs() -> None:
    report = check(faults.implementations["FiniteFill"], clauses=["MSK-8"], dtypes=["float32"])
    (verdict,) = report.verdicts
    text = describe(verdict)
    for part in ("MSK-8 (MUST)", "FiniteFill, float32 on cpu", "Case(mask='empty_rows')", "should be", "import torch"):
        assert part in text
    lines = "\n".join(summarise(report.verdicts))
    assert "FiniteFill: DOES NOT CONFORM" in lines
    cause = "a query without an allowed key attends to all keys equally, as with a finite fill"
    assert cause in " ".join(lines.split())


@pytest.mark.parametrize(
    "options", [{"profile": "slow"}, {"clauses": ["MSK-99"]}, {"dtypes": ["float8"]}, {"devices": ["tpu"]}], ids=str
)
def test_unknown_settings_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"unknown \w+ .*(nown: |families are )") as error:
        check(faults.correct, **options)
    assert "\n" not in str(error.value)


class OffForOneKindOfInput(faults.Complete):
    """Compiled, it is incorrect for inputs that require gradients."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        result = super().attend(query, *rest)
        off = torch.compiler.is_compiling() and self.concerns(query)
        return result._replace(output=result.output * 1.5) if off else result

    def concerns(self, query: Tensor) -> bool:
        return query.requires_grad


class OffForPlainInputs(OffForOneKindOfInput):
    """Compiled, it is incorrect for inputs that require no gradients."""

    def concerns(self, query: Tensor) -> bool:
        return not query.requires_grad


class OffWithoutGradients(OffForOneKindOfInput):
    """Compiled, it is incorrect where gradients are disabled."""

    def concerns(self, query: Tensor) -> bool:
        return not torch.is_grad_enabled()


@pytest.mark.parametrize("cls", [OffForOneKindOfInput, OffForPlainInputs, OffWithoutGradients])
def test_inputs_with_and_without_gradients_are_compiled(cls: type[OffForOneKindOfInput]) -> None:
    report = check(faults.implementation_of(cls), "quick", clauses=["CMP-1"], dtypes=["float64"])
    assert report.failing == "CMP-1"


# What follows tests `verdict_of`, on results that no run gave.

SOME_CASES = (Case(), Case(L=2), Case(L=3))


def untested(clause: str = "MSK-8") -> Verdict:
    """Return what is known of a verdict before any property runs."""
    level = CLAUSES[clause].level
    return Verdict(implementation="Correct", clause=clause, level=level, dtype="float32", device="cpu", status="pass")


def prop_of(clause: str = "MSK-8", number: int = 1) -> Property:
    return next(prop for prop in properties()[clause] if prop.number == number)


def failure_of(violation: Violation, case: Case = SOME_CASES[1]) -> Failure:
    return Session(faults.correct, case), violation


def failed(violation: Violation, prop: Property | None = None, **fields: Any) -> PropertyResult:
    """Return the result of a property that failed on the second of its cases."""
    known = {"prop": prop or prop_of(), "cases": SOME_CASES, "failure": failure_of(violation), "cases_to_failure": 2}
    return PropertyResult(**known | fields)


def waiver_of(reason: str = "known", **fields: Any) -> Waiver:
    return Waiver(implementation="Correct", clause="MSK-8", reason=reason, **fields)


def passed(**fields: Any) -> PropertyResult:
    """Return the result of a property that passed."""
    return PropertyResult(**{"prop": prop_of(), "cases": SOME_CASES, "margin": 0.25} | fields)


def test_results_without_failure_pass_and_are_added_up() -> None:
    zeros, more_zeros = {"zeros": Rejections(1, 2)}, {"zeros": Rejections(3, 3), "noise": Rejections(1, 1)}
    results = [passed(rejections=zeros), passed(cases=SOME_CASES[:1], margin=0.75, rejections=more_zeros)]
    verdict = verdict_of(untested(), results, [])
    assert (verdict.status, verdict.examples, verdict.margin) == ("pass", 4, 0.75)
    assert verdict.rejections == {"noise": Rejections(1, 1), "zeros": Rejections(4, 5)}
    assert verdict.conforms


def test_no_cases_are_not_claimed() -> None:
    needs = PropertyResult(prop=prop_of(), not_applicable="needs the claim masks")
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
    precondition = FailedPrecondition("HED-1", "a plain call fails HED-1: output_2[0] is 1, but should be 2")
    verdict = verdict_of(untested(), [failed(Violation("off"), blocked_by=precondition)], [])
    assert (verdict.status, verdict.blocked_by) == ("fail", "HED-1")
    assert verdict.message == f"off [{precondition.message}]"
    assert verdict.case == "Case(L=2)"
    assert not verdict.conforms


def test_a_violation_of_another_family_is_explained_by_it() -> None:
    violation = Violation("the call changed its query in place", family="STA")
    verdict = verdict_of(untested(), [failed(violation)], [])
    assert (verdict.status, verdict.blocked_by, verdict.message) == ("fail", "STA", violation.message)
    own = Violation("a mask", family="MSK")
    assert verdict_of(untested(), [failed(own)], []).blocked_by is None


def test_a_violation_of_another_family_fails_in_a_variant() -> None:
    """Nothing else has built the variant, so the clause of the other family may pass."""
    verdict = verdict_of(untested("GQA-1"), [failed(Violation("the shape", family="SHP"), prop_of("GQA-1"))], [])
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
    assert (verdict.status, verdict.case, verdict.violated) == ("waived", "Case(L=2)", results[0].prop.name)
    assert verdict.message == "off [waived: it is known]"
    assert verdict.conforms


def test_a_failure_outside_its_waiver_fails() -> None:
    verdict = verdict_of(untested(), [failed(Violation("off"))], [waiver_of("it is known", where="L == 9")])
    assert verdict.status == "fail"
    assert "not covered by its waiver: it is known" in verdict.message


def test_a_waiver_is_stale_where_nothing_fails() -> None:
    verdict = verdict_of(untested("SHP-5"), [passed(prop=prop_of("SHP-5"))], [waiver_of("it is known")])
    assert (verdict.status, verdict.required, verdict.conforms) == ("stale_waiver", True, False)
    assert "delete its waiver: it is known" in verdict.message


def test_a_waiver_is_stale_where_nothing_is_judged() -> None:
    result = PropertyResult(prop=prop_of(), not_applicable="needs the claim masks")
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
        assert (verdict.status, verdict.message) == ("pass", "no case that was tried needs its waiver: it is known")
    unclaimed = PropertyResult(prop=prop_of(), not_applicable="needs the claim masks")
    assert verdict_of(untested(), [unclaimed], [waiver_of()], few=True).status == "stale_waiver"


def test_an_expired_waiver_waives_nothing() -> None:
    expired = waiver_of("it was known", expires=date(2020, 1, 1))
    passing = check(faults.correct, "quick", clauses=["MSK-8"], dtypes=["float32"], waivers=[expired]).verdicts[0]
    assert passing.status == "stale_waiver"
    assert "expired on 2020-01-01: it was known" in passing.message
    waiver = replace(expired, implementation="FiniteFill")
    finite_fill = faults.implementations["FiniteFill"]
    failing = check(finite_fill, "quick", clauses=["MSK-8"], dtypes=["float32"], waivers=[waiver]).verdicts[0]
    assert failing.status == "fail"
    assert "expired on 2020-01-01: it was known" in failing.message
