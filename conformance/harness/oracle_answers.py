"""What the oracle says, always computed on the CPU.

On a GPU, hundreds of small kernels would wait for one another. Answers on large problems are kept
for a while, since known-bad answers are tried on the same cases.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import combinations
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from mha.conformance.harness.plain import untouched, viewed
from mha.implementations.process.pristine import may_answer
from mha.spec import Claims, Expected, Problem, gradients, oracle, sum_shared
from mha.spec.bounds import Ball
from mha.spec.problem import INPUTS

# How many numbers of all answers are kept, 128 MiB in float64, and about how many the oracle has
# for each score.
ROOM, PER_SCORE = 1 << 24, 12
# Keeping the answer on a problem with fewer scores and weights costs more time than it saves.
SMALL = 1 << 13

Answer = TypeVar("Answer")


def expected(problem: Problem, claims: Claims) -> Expected:
    """Return what `oracle` does, on the device of the problem.

    Raises RuntimeError as `require_no_call` does.
    """
    require_no_call()
    problem = untouched(problem)
    answer: Expected = moved(_expected(problem.cpu(), claims), problem.query.device)
    return answer


def _expected(problem: Problem, claims: Claims) -> Expected:
    size = PER_SCORE * prod(problem.shape)
    return kept.answer(problem, ("oracle", claims), size, lambda: oracle(problem, claims))


def expected_gradients(
    problem: Problem, claims: Claims, upstream: Tensor, upstream_lse: Tensor | None = None
) -> dict[str, Ball]:
    """Return what `gradients` does, on the device of the problem.

    The gradients of inputs that are one tensor are added up.
    """
    require_no_call()
    problem = untouched(problem)
    on_cpu, given = problem.cpu(), [viewed(upstream.detach()).cpu()]
    of_lse = None
    if upstream_lse is not None:
        of_lse = viewed(upstream_lse.detach()).cpu()
        given.append(of_lse)

    def differentiate() -> dict[str, Ball]:
        answer = _expected(on_cpu, claims)
        return sum_shared(on_cpu, gradients(on_cpu, claims, given[0], answer, of_lse))

    size = 2 * sum(x.numel() for x in _tensors(on_cpu))
    question = "gradients", claims
    found: dict[str, Ball] = kept.answer(on_cpu, question, size, differentiate, *given)
    answer: dict[str, Ball] = moved(found, problem.query.device)
    return answer


def require_no_call() -> None:
    """Raise RuntimeError while judged code may be running, and in a thread that it has started.

    What it computes by `mha.spec.oracle` from its own inputs is a correct answer, and is not
    refused.
    """
    if not may_answer():
        raise RuntimeError(
            "no expected result is given while the attention is called, nor to a thread of it"
        )


def moved(answer: Any, device: torch.device) -> Any:
    """Return an answer with all its tensors on a device; the answer itself if that is the CPU."""
    if device.type == "cpu":
        return answer
    if isinstance(answer, Tensor):
        return answer.to(device)
    if isinstance(answer, dict):
        return {name: moved(part, device) for name, part in answer.items()}
    if is_dataclass(answer) and not isinstance(answer, type):
        parts = {each.name: moved(getattr(answer, each.name), device) for each in fields(answer)}
        return replace(answer, **parts)
    if callable(answer):  # what makes a part when it is asked for
        return lambda: moved(answer(), device)
    return answer


@dataclass
class Answers:
    """Answers by the content of what was asked, the oldest first.

    size: how many numbers they have together.
    """

    answers: OrderedDict[Hashable, tuple[int, Any]] = field(default_factory=OrderedDict)
    size: int = 0

    def answer(
        self,
        problem: Problem,
        question: Hashable,
        size: int,
        ask: Callable[[], Answer],
        *others: Tensor,
    ) -> Answer:
        """Return the answer to a question about a problem, asking unless it is kept.

        Only answers on the CPU are. The latest one is kept whatever its size.

        size: about how many numbers the answer has.
        others: tensors that the answer depends on besides.
        """
        is_small = prod(problem.shape) + problem.weights.w_q.numel() < SMALL
        if is_small or problem.query.device.type != "cpu":
            return ask()
        key = question, _content_of(problem), tuple(map(_content, others))
        if key not in self.answers:
            self.answers[key] = size, ask()
            self.size += size
        self.answers.move_to_end(key)
        while self.size > ROOM and len(self.answers) > 1:
            _, (dropped, _) = self.answers.popitem(last=False)
            self.size -= dropped
        given: Answer = self.answers[key][1]
        return given


kept = Answers()


def _content_of(problem: Problem) -> Hashable:
    """Return what makes two problems one.

    That is all numbers and how they lie in memory, and which inputs are one tensor.
    """
    shared = tuple(first is second for first, second in combinations(_inputs(problem), 2))
    weights = tuple(name for name, _ in problem.weights.named())
    options = tuple(problem.options.of_scores.items())
    called = problem.is_causal, options, problem.mask is None, problem.places is None
    return problem.config, called, shared, weights, tuple(map(_content, _tensors(problem)))


def _inputs(problem: Problem) -> list[Tensor]:
    return [getattr(problem, name) for name in INPUTS]


def _tensors(problem: Problem) -> list[Tensor]:
    """Return inputs, weights and, last, mask and places, if there are any."""
    others = [x for x in (problem.mask, problem.places) if x is not None]
    return [*_inputs(problem), *(x for _, x in problem.weights.named()), *others]


def _content(x: Tensor) -> Hashable:
    """Return the numbers of a tensor as a digest, of 64 bits, and how they lie in memory."""
    dense = x.detach().clone(memory_format=torch.contiguous_format)
    numbers = dense.reshape(-1).view(torch.uint8).numpy()
    return x.dtype, x.shape, x.stride(), hash(numbers.tobytes())
