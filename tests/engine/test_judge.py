"""The judge: verdicts on claims, failures and broken implementations."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.conformance import check
from mha.conformance.faults import registry as faults
from mha.conformance.properties.registry import properties
from mha.conformance.reports.text import describe, summarise
from mha.conformance.results import VOLATILE, Report
from mha.spec import CLAUSES, Claims, Config, Options, Output, Weights


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

            def __call__(
                self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
            ) -> Output:
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
        report = check(recorder, "quick", seed, clauses=["NUM-1"], dtypes=["float32"])
        assert report.conforms
        runs.append((recorder.digest.hexdigest(), without_volatile_fields(report)))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]


def test_report_has_a_verdict_for_each_clause_and_dtype() -> None:
    report = check(faults.correct, "quick", clauses=["CFG-1", "CAU-2"])
    data = json.loads(report.to_json())
    assert data["conforms"] is True
    pairs = {(verdict["clause"], verdict["dtype"]) for verdict in data["verdicts"]}
    assert pairs == {
        (clause, dtype) for clause in ("CFG-1", "CAU-2") for dtype in ("float32", "float64")
    }
    assert all(verdict["examples"] > 10 for verdict in data["verdicts"])


@pytest.mark.parametrize("profile", ["quick", "default"])
def test_float64_takes_fewest_cases_where_float32_runs_too(profile: str) -> None:
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
    modest = replace(
        faults.correct, claims=Claims(causal=None, returns_weights=False, dtypes={"float32"})
    )
    report = check(
        modest, "quick", clauses=["CAU-2", "SHP-2", "CFG-1"], dtypes=["float32", "float64"]
    )
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
        def allow(self, options: Options, *rest: Any) -> torch.Tensor:
            if options.mask is not None:
                raise NotImplementedError("no masks yet")
            return super().allow(options, *rest)

    (verdict,) = check(
        faults.implementation_of(NoMasks), clauses=["MSK-4"], dtypes=["float32"]
    ).verdicts
    assert verdict.status == "refused"
    assert "no masks yet" in verdict.message
    assert not verdict.conforms


def test_an_exception_is_a_failure() -> None:
    class RaisesForTwoQueries(faults.Correct):
        def merge(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[2] == 2:  # the plain case has another length, or the clause would be blocked
                raise RuntimeError("two are too many")
            return super().merge(x)

    (verdict,) = check(
        faults.implementation_of(RaisesForTwoQueries), clauses=["NUM-1"], dtypes=["float32"]
    ).verdicts
    assert verdict.status == "fail"
    assert re.fullmatch(
        r"the call raised RuntimeError: two are too many \(test_judge.py, line \d+ in merge\)",
        verdict.message,
    )
    assert verdict.case is not None
    assert "L=2" in verdict.case


def test_a_result_that_depends_on_earlier_calls_is_a_failure() -> None:
    class OffEverySeventhCall(faults.Correct):
        calls = 0

        def merge(self, x: torch.Tensor) -> torch.Tensor:
            type(self).calls += 1
            return super().merge(x) * (1.5 if type(self).calls % 7 == 0 else 1.0)

    (verdict,) = check(
        faults.implementation_of(OffEverySeventhCall), clauses=["NUM-1"], dtypes=["float32"]
    ).verdicts
    assert verdict.status == "fail"


@pytest.mark.parametrize("returned", [None, 3, (1, 2, 3), Output("text", None)])  # type: ignore[arg-type]  # on purpose
def test_an_invalid_result_is_a_failure(returned: Any) -> None:
    class ReturnsInvalid(faults.Correct):
        def forward(self, *inputs: Any, mask: Any = None, is_causal: bool = False) -> Any:
            return returned

    (verdict,) = check(
        faults.implementation_of(ReturnsInvalid), clauses=["SHP-1"], dtypes=["float32"]
    ).verdicts
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
    for part in (
        "MSK-8 (MUST)",
        "FiniteFill, float32 on cpu",
        "Case(mask='empty_rows')",
        "should be",
        "import torch",
    ):
        assert part in text
    lines = "\n".join(summarise(report.verdicts))
    assert "FiniteFill: DOES NOT CONFORM" in lines
    cause = "a query without an allowed key attends to all keys equally, as with a finite fill"
    assert cause in " ".join(lines.split())


@pytest.mark.parametrize(
    "options",
    [{"profile": "slow"}, {"clauses": ["MSK-99"]}, {"dtypes": ["float8"]}, {"devices": ["tpu"]}],
    ids=str,
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls",
    [
        OffForOneKindOfInput,
        pytest.param(OffForPlainInputs, marks=pytest.mark.slow),
        pytest.param(OffWithoutGradients, marks=pytest.mark.slow),
    ],
)
def test_inputs_with_and_without_gradients_are_compiled(cls: type[OffForOneKindOfInput]) -> None:
    report = check(faults.implementation_of(cls), "quick", clauses=["CMP-1"], dtypes=["float64"])
    assert report.failing == "CMP-1"
