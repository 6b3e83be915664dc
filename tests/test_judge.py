"""The engine: what it does with claims, waivers, refusals, flaky and broken implementations, and its own errors."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from reports_made import without_volatile
from torch import Tensor

from mha.conformance import check
from mha.conformance.faults import registry as faults
from mha.conformance.properties.registry import properties
from mha.conformance.reports.text import describe, summarise
from mha.spec import CLAUSES, Claims, Config, Output, Weights


def test_every_property_is_about_a_clause_and_named_once() -> None:
    names = [prop.name for members in properties().values() for prop in members]
    assert len(names) == len(set(names))
    assert set(properties()) <= set(CLAUSES)


class Recorder:
    """A correct implementation that remembers what it was given."""

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


CLAUSES_OF_A_SAMPLE = ["MSK-1", "EQV-1", "NUM-1"]


def test_one_seed_gives_the_same_cases_and_report() -> None:
    runs = []
    for seed in (3, 3, 4):
        recorder = Recorder()
        report = check(recorder, "quick", seed, clauses=CLAUSES_OF_A_SAMPLE, dtypes=["float32"])
        assert report.conforms
        runs.append((recorder.digest.hexdigest(), without_volatile(report.to_json())))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]


def test_report_is_json_with_a_verdict_for_each_clause() -> None:
    report = check(faults.correct, "quick", clauses=["CFG-1", "CAU-2"])
    told = json.loads(report.to_json())
    assert told["conforms"] is True
    pairs = {(verdict["clause"], verdict["dtype"]) for verdict in told["verdicts"]}
    assert pairs == {(clause, dtype) for clause in ("CFG-1", "CAU-2") for dtype in ("float32", "float64")}
    assert all(verdict["examples"] > 10 for verdict in told["verdicts"])


def test_what_is_not_claimed_is_not_judged() -> None:
    modest = replace(faults.correct, claims=Claims(causal=None, returns_weights=False, dtypes={"float32"}))
    report = check(modest, "quick", clauses=["CAU-2", "SMX-2", "CFG-1"], dtypes=["float32", "float64"])
    statuses = {(v.clause, v.dtype): (v.status, v.message) for v in report.verdicts}
    assert statuses["CAU-2", "float32"] == ("not_claimed", "needs the claim causal")
    assert statuses["SMX-2", "float32"] == ("not_claimed", "needs the claim returns_weights")
    assert statuses["CFG-1", "float32"][0] == "pass"
    assert statuses["CFG-1", "float64"] == (
        "not_claimed",
        "float64 on cpu is not claimed; claimed: float32 on cpu, cuda",
    )
    assert report.conforms


def test_claimed_but_not_implemented_is_refused() -> None:
    class Refuses(faults.Correct):
        def allow(self, mask: torch.Tensor | None, *rest: Any) -> torch.Tensor:
            if mask is not None:
                raise NotImplementedError("no masks yet")
            return super().allow(mask, *rest)

    (verdict,) = check(faults.implementation_of(Refuses), clauses=["MSK-4"], dtypes=["float32"]).verdicts
    assert verdict.status == "refused"
    assert "no masks yet" in verdict.message
    assert not verdict.conforms


def test_an_exception_is_a_failure_and_told() -> None:
    class Raises(faults.Correct):
        def merge(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[2] == 2:  # not so in the plainest case, which would block the rest
                raise RuntimeError("two are too many")
            return super().merge(x)

    (verdict,) = check(faults.implementation_of(Raises), clauses=["NUM-1"], dtypes=["float32"]).verdicts
    assert verdict.status == "fail"
    assert verdict.message == "the call raised RuntimeError: two are too many"
    assert verdict.case is not None
    assert "L=2" in verdict.case


def test_a_result_that_depends_on_earlier_calls_is_a_failure() -> None:
    class Counts(faults.Correct):
        calls = 0

        def merge(self, x: torch.Tensor) -> torch.Tensor:
            type(self).calls += 1
            return super().merge(x) * (1.5 if type(self).calls % 7 == 0 else 1.0)

    (verdict,) = check(faults.implementation_of(Counts), clauses=["NUM-1"], dtypes=["float32"]).verdicts
    assert verdict.status == "fail"


@pytest.mark.parametrize("returned", [None, 3, (1, 2, 3), Output("text", None)])  # type: ignore[arg-type]  # on purpose
def test_garbage_is_a_failure_and_named(returned: Any) -> None:
    class Garbage(faults.Correct):
        def forward(self, *inputs: Any, mask: Any = None, is_causal: bool = False) -> Any:
            return returned

    (verdict,) = check(faults.implementation_of(Garbage), clauses=["SHP-1"], dtypes=["float32"]).verdicts
    assert verdict.status == "fail"
    assert "should return Output" in verdict.message


def test_an_error_of_the_judge_is_no_verdict_on_the_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("in the judge")

    monkeypatch.setattr("mha.conformance.harness.session.oracle", broken)
    report = check(faults.correct, clauses=["NUM-1"], dtypes=["float32"])
    assert report.verdicts[0].status == "harness_error"
    assert "in the judge" in report.verdicts[0].message
    assert not report.conforms


def test_a_failure_is_told_with_all_that_a_reader_needs() -> None:
    report = check(faults.implementations["FiniteFill"], clauses=["MSK-8"], dtypes=["float32"])
    (verdict,) = report.verdicts
    text = describe(verdict)
    for part in ("MSK-8 (MUST)", "FiniteFill, float32 on cpu", "Case(mask='empty_rows')", "should be", "import torch"):
        assert part in text
    lines = "\n".join(summarise(report.verdicts))
    assert "FiniteFill: DOES NOT CONFORM" in lines
    assert "fail MSK-8 (float32 cpu)" in lines


def test_the_words_of_check_are_checked() -> None:
    for options in ({"profile": "slow"}, {"clauses": ["MSK-99"]}, {"dtypes": ["float8"]}, {"devices": ["tpu"]}):
        with pytest.raises(ValueError, match="known are"):
            check(faults.correct, **options)


class OfOneKindOfInput(faults.Complete):
    """Compiled, it is wrong for inputs that require gradients, or for those that do not."""

    require = True

    def attend(self, query: Tensor, *given: Any) -> Output:
        found = super().attend(query, *given)
        wrong = torch.compiler.is_compiling() and self.concerns(query)
        return found._replace(output=found.output * 1.5) if wrong else found

    def concerns(self, query: Tensor) -> bool:
        return query.requires_grad is self.require


class OfPlainInputs(OfOneKindOfInput):
    require = False


class OfInference(OfOneKindOfInput):
    def concerns(self, query: Tensor) -> bool:
        return not torch.is_grad_enabled()


@pytest.mark.parametrize("cls", [OfOneKindOfInput, OfPlainInputs, OfInference])
def test_inputs_with_and_without_gradients_are_compiled(cls: type[OfOneKindOfInput]) -> None:
    report = check(faults.implementation_of(cls), "quick", clauses=["CMP-1"], dtypes=["float64"])
    assert report.failing == "CMP-1"
