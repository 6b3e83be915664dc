"""A trial: one implementation on one case, every call recorded so that a failure can be told and repeated."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.violation import Refusal, Violation
from mha.spec import Answer, Attention, Config, Implementation, Problem, Weights, oracle

GRADIENT_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "eval": nullcontext,
    "train": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@dataclass(frozen=True, eq=False)
class Observed:
    """A tensor that the implementation gave; `code` is the expression that names it in a script."""

    tensor: Tensor
    name: str
    trial: Trial
    index: tuple[Any, ...] = ()

    @property
    def code(self) -> str:
        """The name, and the index if it is a part."""
        return f"{self.name}[{', '.join(map(_index_code, self.index))}]" if self.index else self.name

    def __getitem__(self, index: Any) -> Observed:
        part = index if isinstance(index, tuple) else (index,)
        if all(isinstance(place, int) for place in self.index):
            return Observed(self.tensor[index], self.name, self.trial, self.index + part)
        return Observed(self.tensor[index], self.code, self.trial, part)

    def detached(self) -> Observed:
        """The same without its history, for comparing."""
        return replace(self, tensor=self.tensor.detach())

    def row_sums(self) -> Observed:
        """The sums over the last dimension, taken in float64."""
        return Observed(self.tensor.double().sum(-1), f"{self.code}.double().sum(-1)", self.trial)


@dataclass(frozen=True, eq=False)
class Build:
    """One construction: what the implementation was built from."""

    number: int
    config: Config
    weights: Weights


@dataclass(frozen=True, eq=False)
class Call:
    """One call: of which construction, with what, and for which rows gradients were asked, if any."""

    number: int
    build: int
    problem: Problem
    need_weights: bool
    differentiated: str | None = None


@dataclass(frozen=True, eq=False)
class Observation:
    """What one call gave; `weights` is None where none were asked for, or none came."""

    output: Observed
    weights: Observed | None


class Trial:
    """The attention under test, bound to a case: its modes, its device, its dtype.

    Calling it with a problem gives an `Observation`. Whatever the implementation raises becomes a `Refusal`.
    margin: the largest error/bound seen so far.
    """

    def __init__(self, implementation: Implementation, case: Case) -> None:
        self.implementation, self.claims, self.case = implementation, implementation.claims, case
        self._done: list[Build | Call] = []
        self._last: Build | Call | None = None
        self.margin = 0.0
        self._built: dict[tuple[Config, int], tuple[int, Attention]] = {}

    def build(self, config: Config, weights: Weights) -> Attention:
        """Build the implementation; what it raises becomes a `Refusal`."""
        dtype = getattr(torch, self.case.dtype)
        with self._step(Build(len(self._done) + 1, config, weights)), _guarded(f"build({config})"):
            return self.implementation.build(config, weights, dtype=dtype, device=self.case.device)

    def __call__(self, problem: Problem, *, need_weights: bool | None = None) -> Observation:
        """Call the attention on the path of the case."""
        with GRADIENT_MODES[self.case.path]():
            seen = self._call(problem, self.case.need_weights if need_weights is None else need_weights)
        output, weights = seen.output, seen.weights
        return Observation(output.detached(), weights and weights.detached())

    def gradients(self, problem: Problem, rows: Any) -> dict[str, Observed]:
        """Return the gradients of the sum of the output's `rows` with respect to each input, by name.

        In self-attention the one input is the query.
        """
        names = ("query",) if problem.is_self else ("query", "key", "value")
        leaves = {name: getattr(problem, name).detach().clone().requires_grad_() for name in names}
        changed = problem.with_input(leaves["query"]) if problem.is_self else problem.change(**leaves)
        observed = self._call(changed, self.case.need_weights, _index_code(rows))
        with _guarded("backward()"):
            observed.output.tensor[rows].sum().backward()
        number = self.steps[-1].number
        grads = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
        return {name: Observed(grad, f"{name}_{number}.grad", self) for name, grad in grads.items()}

    def answer(self, problem: Problem) -> Answer:
        """Return the right answer and its bound."""
        return oracle(problem, self.claims)

    def _call(self, problem: Problem, need_weights: bool, differentiated: str | None = None) -> Observation:
        build, attention = self._attention(problem)
        number = len(self._done) + 1
        with self._step(Call(number, build, problem, need_weights, differentiated)), _guarded("the call"):
            returned = attention(
                problem.query,
                problem.key,
                problem.value,
                mask=problem.mask,
                is_causal=problem.is_causal,
                need_weights=need_weights,
            )
        output, weights = self._checked(returned)
        return Observation(
            Observed(output, f"output_{number}", self),
            Observed(weights, f"weights_{number}", self) if need_weights and weights is not None else None,
        )

    @property
    def steps(self) -> list[Build | Call]:
        """What was done, in order; a step that raised is only there if it was the last."""
        return self._done if self._last is None else [*self._done, self._last]

    @contextmanager
    def _step(self, step: Build | Call) -> Iterator[None]:
        self._last = step
        yield
        self._done.append(step)
        self._last = None

    def _attention(self, problem: Problem) -> tuple[int, Attention]:
        key = problem.config, id(problem.weights)
        if key not in self._built:
            attention = self.build(problem.config, problem.weights)
            attention.train() if self.case.path == "train" else attention.eval()
            self._built[key] = self.steps[-1].number, attention
        return self._built[key]

    def _checked(self, returned: Any) -> tuple[Tensor, Tensor | None]:
        output, weights = getattr(returned, "output", None), getattr(returned, "weights", None)
        if type(output) is not Tensor or not (weights is None or type(weights) is Tensor):
            shown = f"{type(output).__name__} and {type(weights).__name__}" if output is not None else repr(returned)
            raise Violation(f"the call returned {shown[:200]}, but should return Output(output, weights) of tensors")
        return output, weights


@contextmanager
def _guarded(what: str) -> Iterator[None]:
    """Turn what the implementation raises into a `Refusal`; its warnings decide nothing, also where they are errors."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        raise Refusal(f"{what} raised {_told(error)}", error) from error


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _index_code(index: Any) -> str:
    if isinstance(index, tuple):
        return ", ".join(map(_index_code, index))
    if isinstance(index, slice):
        bounds = ("" if bound is None else str(bound) for bound in (index.start, index.stop))
        return ":".join(bounds)
    if isinstance(index, Tensor):
        return repr(index.tolist())
    return "..." if index is Ellipsis else repr(index)
