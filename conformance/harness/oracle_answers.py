"""What the oracle says of large problems, kept for a while: known-bad answers are tried on the same cases."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from mha.spec import Claims, Expected, Problem, gradients, oracle, sum_shared
from mha.spec.bounds import Ball
from mha.spec.problem import INPUTS

# How many numbers of all answers are kept, 128 MiB in float64, and about how many the oracle has for each score.
ROOM, PER_SCORE = 1 << 24, 12
# Keeping the answer on a problem with fewer scores and weights costs more time than it saves.
SMALL = 1 << 13

Answer = TypeVar("Answer")


def expected(problem: Problem, claims: Claims) -> Expected:
    """Return what `oracle` does."""
    size = PER_SCORE * prod(problem.shape)
    return kept.answer(problem, ("oracle", claims), size, lambda: oracle(problem, claims))


def expected_gradients(problem: Problem, claims: Claims, upstream: Tensor) -> dict[str, Ball]:
    """Return what `gradients` does, with those of inputs that are one tensor added up."""

    def differentiate() -> dict[str, Ball]:
        return sum_shared(problem, gradients(problem, claims, upstream, expected(problem, claims)))

    size = 2 * sum(x.numel() for x in _tensors(problem))
    return kept.answer(problem, ("gradients", claims), size, differentiate, upstream)


@dataclass
class Answers:
    """Answers by the content of what was asked, the oldest first, and how many numbers they have together."""

    answers: OrderedDict[Hashable, tuple[int, Any]] = field(default_factory=OrderedDict)
    size: int = 0

    def answer(
        self, problem: Problem, question: Hashable, size: int, ask: Callable[[], Answer], *others: Tensor
    ) -> Answer:
        """Return the answer to a question about a problem, asking unless it is kept; on the CPU alone.

        size: about how many numbers the answer has. The latest answer is kept whatever its size. others: tensors that
        the answer depends on besides.
        """
        if problem.query.device.type != "cpu" or prod(problem.shape) + problem.weights.w_q.numel() < SMALL:
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
    """Return what makes two problems one: all numbers and how they lie in memory, and which inputs are one tensor."""
    shared = tuple(first is second for first, second in combinations(_inputs(problem), 2))
    weights = tuple(name for name, _ in problem.weights.named())
    return problem.config, problem.is_causal, shared, weights, tuple(map(_content, _tensors(problem)))


def _inputs(problem: Problem) -> list[Tensor]:
    return [getattr(problem, name) for name in INPUTS]


def _tensors(problem: Problem) -> list[Tensor]:
    """Return inputs, weights and, last, the mask, if there is one."""
    mask = [] if problem.mask is None else [problem.mask]
    return [*_inputs(problem), *(x for _, x in problem.weights.named()), *mask]


def _content(x: Tensor) -> Hashable:
    """Return the numbers of a tensor as a digest, of 64 bits, and how they lie in memory."""
    numbers = x.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()
    return x.dtype, x.shape, x.stride(), hash(numbers.tobytes())
