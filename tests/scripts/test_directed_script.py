"""The script of a directed failure: the same share of the same defect, without the judge."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from mha.conformance import check
from mha.conformance.cases.case import Case
from mha.conformance.cases.mask_kinds import FEW
from mha.conformance.cases.transforms import with_extra
from mha.conformance.cases.variants import as_variant
from mha.conformance.faults import registry
from mha.conformance.faults.base import complete
from mha.conformance.harness.errors import Violation
from mha.conformance.harness.recording import CallStep
from mha.conformance.harness.session import Session
from mha.conformance.properties.directed_gradients import directions as directions_of_gradients
from mha.conformance.properties.support.directed_script import assertion_of, gradient_assertion_of
from mha.conformance.properties.support.directions import directions, key_of_late_tile
from mha.conformance.scripts.reproduction import script
from mha.implementations.loop import implementation as loop
from mha.spec import Claims, Problem
from mha.spec.directed import projection
from mha.spec.directed_gradients import projection_of_gradients
from mha.spec.gradient_graph import gradient_graph
from mha.spec.rounding_graph import rounding_graph

# Of a correct implementation.
PLACE = "mha.implementations.loop import implementation"
CASE = Case(n_heads=4, head_dim=8, B=2, L=9, S=12, dtype="bfloat16", seed=5)
CASES = {
    "cross": CASE,
    "self": replace(CASE, inputs="self", S=9),
    "causal": replace(CASE, causal=True),
    "no bias": replace(CASE, bias=False),
    "laid out": replace(CASE, layout="transposed"),
    "grouped": CASE,
    "float mask": replace(CASE, mask=FEW[0], additive=True),
    **{mask: replace(CASE, mask=mask) for mask in (*FEW, "bias")},
}
# GRD-8 has none of these.
EXTRA_KEYS = {
    "bias_kv": ("bias_kv",),
    "zero_key": ("zero_key",),
    "both extra keys": ("bias_kv", "zero_key"),
}
OUTPUT_CASES = {**CASES, **dict.fromkeys(EXTRA_KEYS, CASE), "zero_key": replace(CASE, mask="bias")}


def problem_of(which: str) -> Problem:
    """The problem of one of the cases."""
    if which == "grouped":
        return as_variant(CASE, "grouped", Claims()).problem()
    case = OUTPUT_CASES[which]
    problem = case.problem()
    for extra in EXTRA_KEYS.get(which, ()):
        problem = with_extra(problem, case, extra)
    return problem


def share_by_script(session: Session, clause: str, assertion: Sequence[str]) -> float:
    """Return the share of a defect that a script finds."""
    text = script(session, clause, Violation("off", tuple(assertion)))
    assert text
    assert ("torch.randn" in text) == (session.case.layout == "contiguous")
    names: dict[str, Any] = {}
    with suppress(AssertionError):
        exec(compile(text, "script", "exec"), names)
    return float(names["share"])


@pytest.mark.mostly_slow(5)
@pytest.mark.parametrize("which", OUTPUT_CASES)
def test_script_finds_the_same_share_of_each_defect(which: str) -> None:
    case = OUTPUT_CASES[which]
    session, problem = Session(complete, case), problem_of(which)
    output, graph = session(problem).output.tensor, rounding_graph(problem, complete.claims)
    call = session.steps[-1]
    assert isinstance(call, CallStep)
    tried = 0
    for direction in directions(graph, case):
        w = direction.change["output"]
        assertion = assertion_of(
            call, call.number, complete.claims, direction.formula, direction.more, 0.0
        )
        share = projection(graph, output, w) / float(w.square().sum())
        assert share_by_script(session, "NUM-7", assertion) == pytest.approx(
            share, rel=1e-6, abs=1e-12
        )
        tried += 1
    late = key_of_late_tile(graph.allowed.shape[-1]) > 0
    assert tried == 8 + late - bool(graph.allowed.all()) + (case.mask == "bias")


@pytest.mark.mostly_slow(4)
@pytest.mark.parametrize("which", CASES)
def test_script_finds_the_same_share_of_each_defect_of_gradients(which: str) -> None:
    case = CASES[which]
    session, problem = Session(complete, case), problem_of(which)
    upstream = torch.randn(problem.query.shape, generator=case.generator).to(problem.query)
    recorded = session.gradients(problem, upstream)
    graph, call = gradient_graph(problem, complete.claims, upstream), session.steps[-1]
    assert isinstance(call, CallStep)
    found = {name: recorded[name].tensor for name in recorded if name in graph.exact}
    codes = {name: recorded[name].code for name in found}
    tried = 0
    for direction in directions_of_gradients(graph, found, case):
        w = direction.change
        assertion = gradient_assertion_of(
            call, complete.claims, codes, direction.formula, direction.more, 0.0
        )
        share = projection_of_gradients(graph, found, w) / sum(
            float(x.square().sum()) for x in w.values()
        )
        assert share_by_script(session, "GRD-8", assertion) == pytest.approx(
            share, rel=1e-6, abs=1e-12
        )
        tried += 1
    assert tried == len(found) + 7 - bool(graph.forward.allowed.all())


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    ("clause", "name"),
    [("NUM-7", "ScaleOffInHalf"), ("NUM-7", "LateValuesLost"), ("GRD-8", "KeyGradientOffInHalf")],
)
def test_script_fails_as_the_verdict_does(clause: str, name: str) -> None:
    (verdict,) = check(
        registry.implementations[name], clauses=[clause], dtypes=["bfloat16"]
    ).verdicts
    assert verdict.script
    assert len(verdict.script) < 5000
    with pytest.raises(AssertionError) as raised:
        exec(compile(verdict.script, "script", "exec"), {})
    said, explained = str(raised.value).split("; ")
    assert verdict.message.split("; ")[1] == explained
    assert re.sub(r"[\d.]+%", "", said) == re.sub(
        r"[\d.]+% \(.*\)", "", verdict.message.split("; ")[0]
    )
    correct = verdict.script.replace(
        f"from mha.conformance.faults.directed import faulty_{name}", f"from {PLACE}"
    )
    assert correct != verdict.script
    exec(compile(correct, "script", "exec"), {})


def test_numbers_that_are_few_or_not_normal_keep_their_bits() -> None:
    for case in (replace(CASE, head_dim=1), replace(CASE, values="integers")):
        session = Session(loop, case)
        session(case.problem())
        text = script(session, "NUM-7", Violation("off", ("assert False",)))
        assert text
        assert "torch.randn" not in text
