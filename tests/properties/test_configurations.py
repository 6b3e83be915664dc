"""The correct classes that faults and known-bad answers derive from take every configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.reference import plain_formula
from mha.conformance.cases.transforms import passing_heads, with_config
from mha.conformance.cases.variants import as_variant
from mha.conformance.faults.base import CLAIMS, OWN_HEAD_DIM, complete
from mha.conformance.harness.known_bad.answers import REJECTED
from mha.conformance.harness.known_bad.defect import KnownBad
from mha.conformance.harness.session import Session
from mha.spec import Claims, Config, Sizes, oracle
from mha.spec.claims import BIASES
from support.random_problems import ratio

CASE = Case(n_heads=2, head_dim=3, B=2, L=3, S=5, mask="bias", seed=4)
CONFIGS = {
    **{f"bias={bias}": Config(d_model=6, n_heads=2, bias=bias) for bias in BIASES},
    "narrow heads": Config(d_model=7, n_heads=2, d_head=2),
    "wide heads": Config(d_model=5, n_heads=2, d_head=4, bias="qo"),
    "grouped wide heads": Config(d_model=5, n_heads=4, n_kv_heads=2, d_head=3, kdim=2),
}


@pytest.mark.parametrize(
    "implementation", [complete, KnownBad(REJECTED["correct"], CLAIMS)], ids=lambda it: it.name
)
@pytest.mark.parametrize("config", CONFIGS)
def test_configuration_is_solved(config: str, implementation: Any) -> None:
    case = Case(n_heads=CONFIGS[config].n_heads, head_dim=3, B=2, L=3, S=5, mask="bias", seed=4)
    problem, session = with_config(case, CONFIGS[config]), Session(implementation, case)
    assert ratio(session(problem).output.tensor, session.expected(problem).output) < 1
    upstream = session.upstream(problem)
    found, expected = (
        session.gradients(problem, upstream),
        session.expected_gradients(problem, upstream),
    )
    biases = {f"b_{role}" for role in "qkvo" if CONFIGS[config].has_bias(role)}
    assert {name for name in found if name.startswith("b_")} == biases
    assert all(ratio(found[name].tensor, expected[name]) < 1 for name in found)


def test_heads_of_their_own_width_are_of_every_kind() -> None:
    cases = [
        Case(n_heads=heads, head_dim=width, seed=seed)
        for heads in (1, 2, 3)
        for width in (1, 4)
        for seed in range(24)
    ]
    configs = [as_variant(case, "own_width", Claims()).config for case in cases]
    assert all(config.inner_width != config.d_model for config in configs)
    assert any(config.d_model % config.n_heads for config in configs)
    assert any(config.inner_width > config.d_model for config in configs)
    assert any(config.inner_width < config.d_model for config in configs)
    claims = Claims(sizes=Sizes(head_dims={4, 6}), own_head_dim=True)
    assert {as_variant(case, "own_width", claims).head_dim for case in cases} == {4, 6}


@pytest.mark.parametrize("inputs", ["self", "memory", "query_key"])
def test_inputs_of_another_width_are_shared_alike(inputs: str) -> None:
    case = Case(n_heads=2, head_dim=3, B=2, L=3, S=3, inputs=inputs)
    before, after = case.problem(), with_config(case, Config(d_model=7, n_heads=2, d_head=2))
    assert list(before.distinct()) == list(after.distinct())
    assert all(x.shape == (2, 3, 7) for x in after.distinct().values())


@pytest.mark.parametrize("d_head", [2, 5])
def test_contexts_pass_as_far_as_they_fit(d_head: int) -> None:
    problem = passing_heads(with_config(CASE, Config(d_model=7, n_heads=2, d_head=d_head)))
    expected = oracle(problem, CLAIMS)
    columns = min(7, 2 * d_head)
    assert torch.equal(expected.output.mid[..., :columns], expected.context.mid[..., :columns])
    assert not expected.output.mid[..., columns:].any()


@pytest.mark.parametrize("claims", [Claims(), Claims(scale=1.0), OWN_HEAD_DIM])
def test_plain_formula_is_that_of_the_oracle(claims: Claims) -> None:
    problem = as_variant(CASE, "own_width" if claims.own_head_dim else "plain", claims).problem()
    plain = plain_formula(problem, problem.allowed(None), claims.scale)
    assert ratio(plain, oracle(problem, claims).output) < 1
