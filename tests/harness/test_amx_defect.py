"""A defect of torch, by which NaN in a row reaches the row before, is blamed on nobody."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mha.conformance.cases.case import Case
from mha.conformance.faults.base import CLAIMS, Complete, implementation_of
from mha.conformance.harness import amx_defect
from mha.conformance.harness.errors import Discard
from mha.conformance.harness.session import Session
from mha.spec import Problem

CASE = Case(n_heads=3, head_dim=3, L=17, S=17, dtype="bfloat16", mask="keys", inputs="cross")
CALLS: dict[str, tuple[bool, Callable[[Problem], Problem]]] = {
    "plain": (False, lambda problem: problem),
    "NaN": (
        True,
        lambda problem: problem.change(key=problem.key.masked_fill(problem.key > 0, float("nan"))),
    ),
    "numbers whose products overflow": (
        True,
        lambda problem: problem.change(value=problem.value * 1e30),
    ),
    "an empty row": (True, lambda problem: problem.change(mask=torch.zeros_like(problem.mask))),
    "few rows": (
        False,
        lambda problem: problem.map_inputs(lambda x: x[:, :16] * 1e30).change(mask=None),
    ),
    "float32": (False, lambda problem: problem.map_inputs(lambda x: x.float() * 1e30)),
}


def test_masks_of_a_wrong_shape_are_left_to_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx_defect, "products_mix_rows", lambda dtype: True)
    wrong = CASE.problem().change(mask=torch.ones(1, 1, 17, 16, dtype=torch.bool), is_causal=True)
    assert not amx_defect.may_mix_rows(wrong, CLAIMS, "eval")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("defective", [True, False])
def test_calls_in_which_torch_may_mix_rows_are_not_judged(
    call: str, defective: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amx_defect, "products_mix_rows", lambda dtype: defective)
    mixes, change = CALLS[call]
    problem = change(CASE.problem())
    assert amx_defect.may_mix_rows(problem, CLAIMS, "eval") is (mixes and defective)


def test_a_session_discards_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx_defect, "products_mix_rows", lambda dtype: True)
    session, problem = Session(implementation_of(Complete), CASE), CASE.problem()
    session(problem)
    with pytest.raises(Discard, match="from row to row"):
        session(problem.change(key=problem.key * float("nan")))
