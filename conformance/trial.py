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
    "train_no_grad": torch.no_grad,
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
    """One call: of which construction, with what, on which path, and for which rows gradients were asked, if any."""

    number: int
    build: int
    problem: Problem
    need_weights: bool
    path: str
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

    def __call__(self, problem: Problem, *, need_weights: bool | None = None, path: str | None = None) -> Observation:
        """Call the attention on the path of the case, with weights as in the case, unless told otherwise."""
        taken = path or self.case.path
        self._attention(problem)  # built as users build it, outside the modes of the call
        with GRADIENT_MODES[taken]():
            seen = self._call(problem, self.case.need_weights if need_weights is None else need_weights, taken)
        output, weights = seen.output, seen.weights
        return Observation(output.detached(), weights and weights.detached())

    def gradients(self, problem: Problem, rows: Any) -> dict[str, Observed]:
        """Return the gradients of the sum of the output's `rows` with respect to the inputs, by name.

        Inputs that are one tensor have one gradient, under the first name.
        """
        leaves = problem.map_inputs(lambda x: x.detach().clone().requires_grad_())
        observed = self._call(leaves, self.case.need_weights, self.case.path, _index_code(rows))
        with _guarded("backward()"):
            observed.output.tensor[rows].sum().backward()
        number = self.steps[-1].number
        named = {id(leaf): (name, leaf) for name in ("value", "key", "query") for leaf in (getattr(leaves, name),)}
        return {
            name: Observed(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, f"{name}_{number}.grad", self)
            for name, leaf in named.values()
        }

    def answer(self, problem: Problem) -> Answer:
        """Return the right answer and its bound."""
        return oracle(problem, self.claims)

    def _call(self, problem: Problem, need_weights: bool, path: str, differentiated: str | None = None) -> Observation:
        build, attention = self._attention(problem)
        number = len(self._done) + 1
        given = {"query": problem.query, "key": problem.key, "value": problem.value, "mask": problem.mask}
        versions = {name: tensor._version for name, tensor in given.items() if tensor is not None}
        with self._step(Call(number, build, problem, need_weights, path, differentiated)), _guarded("the call"):
            attention.train() if path.startswith("train") else attention.eval()
            returned = attention(
                problem.query,
                problem.key,
                problem.value,
                mask=problem.mask,
                is_causal=problem.is_causal,
                need_weights=need_weights,
            )
        for name, version in versions.items():
            tensor = given[name]
            if tensor is not None and tensor._version != version:
                check = f"assert {name}_{number}._version == 0, 'changed in place'"
                raise Violation(f"the call changed its {name} in place, which clause STA-1 forbids", (check,))
        output, weights = getattr(returned, "output", None), getattr(returned, "weights", None)
        if output is None:
            check = f"assert isinstance(output_{number}, torch.Tensor)"
            raise Violation(f"the call returned {returned!r:.200}, but should return Output(output, weights)", (check,))
        batch, heads, queries, keys = problem.shape
        self._check(f"output_{number}", output, problem.query, (batch, queries, problem.config.d_model))
        if not need_weights or weights is None:
            return Observation(Observed(output, f"output_{number}", self), None)
        if self.claims.returns_weights:
            self._check(f"weights_{number}", weights, problem.query, (batch, heads, queries, keys))
        return Observation(Observed(output, f"output_{number}", self), Observed(weights, f"weights_{number}", self))

    def _check(self, code: str, got: Any, like: Tensor, shape: tuple[int, ...]) -> None:
        """Raise a Violation unless this is a plain tensor of this shape, and of the dtype and device of an input."""
        if type(got) is not Tensor:
            raise Violation(
                f"{code} is of type {type(got).__name__}, but should be a tensor: a call should return "
                "Output(output, weights)",
                (f"assert type({code}) is torch.Tensor, type({code})",),
            )
        wanted = {"shape": shape, "dtype": like.dtype, "device": like.device, "layout": torch.strided}
        for name, value in wanted.items():
            seen = getattr(got, name)
            if seen != value:
                shown = tuple(seen) if name == "shape" else seen
                check = f"assert {code}.{name} == {value!r}, {code}.{name}"
                raise Violation(f"{code}.{name} is {shown}, but should be {value}", (check,))

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
            self._built[key] = self.steps[-1].number, attention
        return self._built[key]


@contextmanager
def _guarded(what: str) -> Iterator[None]:
    """Turn what the implementation raises into a `Refusal`; its warnings decide nothing, also where they are errors."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (Exception, SystemExit) as error:
        raise Refusal(f"{what} raised {_told(error)}", error) from error


def _told(error: BaseException) -> str:
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
