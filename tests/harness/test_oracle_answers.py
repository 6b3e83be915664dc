"""The oracle's answers are kept for equal problems only, as many as there is room for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mha.conformance.cases.case import Case
from mha.conformance.harness import oracle_answers
from mha.conformance.harness.oracle_answers import Answers, expected, expected_gradients, moved
from mha.spec import Claims, Problem

CASE = Case(B=2, L=3, S=4, n_heads=2, head_dim=2, mask="padding")
SIZE = oracle_answers.PER_SCORE * 2 * 2 * 3 * 4
CHANGES: dict[str, Callable[[Problem], Problem]] = {
    "numbers": lambda problem: problem.change(key=problem.key + 1),
    "weights": lambda problem: problem.change(w_q=problem.weights.w_q * 2),
    "mask": lambda problem: problem.change(mask=None),
    "causal": lambda problem: problem.change(is_causal=True),
    "layout": lambda problem: problem.change(key=problem.key.mT.contiguous().mT),
    "one tensor": lambda problem: problem.change(value=problem.key),
}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Answers:
    answers = Answers()
    monkeypatch.setattr(oracle_answers, "kept", answers)
    monkeypatch.setattr(oracle_answers, "SMALL", 0)
    return answers


def test_an_equal_problem_gets_the_same_answer(kept: Answers) -> None:
    first, again = CASE.problem(), CASE.problem()
    assert expected(first, Claims()) is expected(again, Claims())
    upstream = torch.ones(2, 3, 4)
    gradients = expected_gradients(first, Claims(), upstream)
    assert gradients is expected_gradients(again, Claims(), upstream.clone())
    assert gradients is not expected_gradients(again, Claims(), 2 * upstream)


def test_answers_on_small_problems_are_not_kept(
    kept: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = CASE.problem()
    monkeypatch.setattr(oracle_answers, "SMALL", 2 * 2 * 3 * 4 + 16 + 1)
    assert expected(problem, Claims()) is not expected(problem, Claims())
    assert not kept.answers


@pytest.mark.parametrize("change", CHANGES)
def test_another_problem_gets_its_own(change: str, kept: Answers) -> None:
    problem = CASE.problem()
    assert expected(problem, Claims()) is not expected(CHANGES[change](problem), Claims())


def test_other_claims_get_their_own(kept: Answers) -> None:
    problem = CASE.problem()
    assert expected(problem, Claims()) is not expected(problem, Claims(scale=1.0))


def test_new_numbers_in_a_tensor_are_seen(kept: Answers) -> None:
    problem = CASE.problem()
    before = expected(problem, Claims())
    problem.value.copy_(-problem.value)
    assert not torch.equal(expected(problem, Claims()).context.mid, before.context.mid)


def test_the_oldest_answers_go_where_there_is_no_room(
    kept: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle_answers, "ROOM", 2 * SIZE)
    problems = [replace(CASE, seed=seed).problem() for seed in range(3)]
    first, second = (expected(problem, Claims()) for problem in problems[:2])
    assert expected(problems[0], Claims()) is first
    expected(problems[2], Claims())
    assert kept.size == 2 * SIZE
    assert expected(problems[0], Claims()) is first
    assert expected(problems[1], Claims()) is not second
    monkeypatch.setattr(oracle_answers, "ROOM", 0)
    latest = expected(problems[2], Claims())
    assert expected(problems[2], Claims()) is latest
    assert kept.size == SIZE


def test_answers_move_to_the_device_of_the_problem_as_a_whole() -> None:
    problem, device = CASE.problem(), torch.device("meta")
    answer = moved(expected(problem, Claims()), device)
    tensors = [
        answer.empty,
        answer.max_score,
        answer.sums.mid,
        answer.output.rad,
        answer.weights.mid,
    ]
    assert {tensor.device for tensor in tensors} == {device}
    gradients = moved(expected_gradients(problem, Claims(), torch.ones(2, 3, 4)), device)
    assert {ball.mid.device for ball in gradients.values()} == {device}
