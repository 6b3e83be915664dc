"""A trial: one implementation on one case, every step recorded so that a failure can be told and repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.layouts import copy_of, lay_out
from mha.conformance.cases.modes import MODES
from mha.conformance.harness.errors import CALL, Violation
from mha.conformance.harness.integrity import require_untouched
from mha.conformance.harness.isolation import guarded, require_plain, require_gradients
from mha.conformance.harness.recording import (
    BuildStep,
    CallStep,
    DeriveStep,
    RecordedOutput,
    RecordedTensor,
    Step,
)
from mha.spec import Attention, Config, Expected, Implementation, Problem, Weights, gradients, oracle, sum_shared
from mha.spec.bounds import Ball
from mha.spec.dtypes import computable
from mha.spec.problem import INPUTS

# What a call might leave changed, to the harm of every later one; STA-5 looks at more.
SETTINGS: dict[str, Callable[[Any], Any]] = {
    "get_default_dtype": torch.set_default_dtype,
    "is_grad_enabled": torch.set_grad_enabled,
    "get_num_threads": torch.set_num_threads,
}


@dataclass(frozen=True, eq=False)
class Instance:
    """An attention of the trial; `attention_1` in its script is that of number 1."""

    number: int
    attention: Attention


class Session:
    """The attention under test, bound to a case: its modes, its device, its dtype.

    Calling it with a problem gives an `Observation`. Whatever the implementation raises becomes a `Refusal`.
    margin: the largest error/bound seen so far. scripted: whether the steps, repeated, show what a property sees.
    """

    def __init__(self, implementation: Implementation, case: Case) -> None:
        self.implementation, self.claims, self.case = implementation, implementation.claims, case
        self._done: list[Step] = []
        self._last: Step | None = None
        self._built: dict[tuple[Config, int], Instance] = {}
        self._modes: dict[int, bool] = {}
        self.margin, self.scripted = 0.0, True

    def build(self, config: Config, weights: Weights) -> Instance:
        """Build the implementation; what it raises becomes a `Refusal`."""
        dtype, step = getattr(torch, self.case.dtype), BuildStep(len(self._done) + 1, config, weights)
        with self._step(step), guarded(f"build({config})"):
            return Instance(
                step.number, self.implementation.build(config, weights, dtype=dtype, device=self.case.device)
            )

    def built(self, problem: Problem) -> Instance:
        """Return the attention with a problem's configuration and weights, building it if need be."""
        key = problem.config, id(problem.weights)
        if key not in self._built:
            self._built[key] = self.build(problem.config, problem.weights)
        return self._built[key]

    def derive(self, origin: Instance, change: Callable[[Any], Any], code: str) -> Instance:
        """Make another attention out of one; `code` is the change, with {} for the attention."""
        step = DeriveStep(len(self._done) + 1, origin.number, code)
        with self._step(step), guarded(code.format("attention")):
            return Instance(step.number, change(origin.attention))

    def unscripted(self, tensor: Tensor, name: str) -> RecordedTensor:
        """Return a tensor that came of no step of the trial as something to compare; no script shows it."""
        self.scripted = False
        return RecordedTensor(tensor, name, self._note_margin)

    def __call__(
        self,
        problem: Problem,
        *,
        need_weights: bool | None = None,
        mode: str | None = None,
        via: Instance | None = None,
        seed: int | None = None,
        dtypes: tuple[torch.dtype, ...] = (),
    ) -> RecordedOutput:
        """Call the attention on the path of the case, with weights as in the case, unless told otherwise.

        via: the attention to call, that of the problem unless given. seed: set before the call.
        dtypes: that the result may have, where that is not the query's alone.
        """
        wanted = self.case.need_weights if need_weights is None else need_weights
        built = via or self.built(problem)  # built as users build it, outside the modes of the call
        step = CallStep(len(self._done) + 1, built.number, problem, wanted, mode or self.case.mode, seed)
        with MODES[step.mode].enter(self.case.device):
            seen = self._call(step, built, dtypes or (problem.query.dtype,))
        return RecordedOutput(seen.output.detached(), seen.weights and seen.weights.detached())

    def gradients(
        self,
        problem: Problem,
        upstream: Tensor,
        wanted: Sequence[str] = (*INPUTS, "mask"),
        *,
        frozen: bool = False,
    ) -> dict[str, RecordedTensor]:
        """Return the gradients of the sum of output * upstream, by name.

        Those of `wanted` inputs (inputs that are one tensor have one gradient, under the first name), of the mask if it
        is one of numbers, and of the weights where the attention tells them; zeros where there is none.
        frozen: the weights require no gradient, and none is told of them.
        """
        chosen = [name for name in wanted if name != "mask"]
        leaves = problem.map_inputs(copy_of)
        mask = problem.mask
        if mask is not None and "mask" in wanted and mask.is_floating_point():
            leaves = leaves.change(mask=copy_of(mask))
            chosen.append("mask")
        for name in chosen:
            getattr(leaves, name).requires_grad_()
        built = self.build(problem.config, problem.weights)
        if frozen:
            built = self.derive(built, lambda module: module.requires_grad_(False), "{}.requires_grad_(False)")
        number = len(self._done) + 1
        step = CallStep(
            number, built.number, leaves, self.case.need_weights, self.case.mode, None, upstream, tuple(chosen)
        )
        with MODES[step.mode].enter(self.case.device):
            output = self._call(step, built, (upstream.dtype,)).output.tensor
        with guarded("backward()"):
            if output.requires_grad:
                output.backward(upstream)
        seen = {
            name: self.record(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, f"{name}_{number}.grad")
            for name, leaf in leaves.distinct(chosen).items()
        }
        if frozen or not self.claims.weight_gradients:
            return seen
        return seen | self.weight_gradients(built, problem.weights)

    def weight_gradients(self, built: Instance, weights: Weights) -> dict[str, RecordedTensor]:
        """Return the gradients of the weights, as an attention tells them."""
        code = f"attention_{built.number}.weight_gradients()"
        with guarded(code):
            found = dict(built.attention.weight_gradients())  # type: ignore[attr-defined]  # it is claimed
        require_gradients(code, found, weights)
        return {name: self.record(found[name], f"{code}[{name!r}]") for name, _ in weights.named()}

    def forward(self, problem: Problem, via: Instance | None = None) -> Tensor:
        """Return the output with its history, for others to differentiate; no script shows it."""
        self.scripted = False
        built = via or self.built(problem)
        step = CallStep(len(self._done) + 1, built.number, problem, False, self.case.mode)
        return self._call(step, built, (problem.query.dtype,)).output.tensor

    def record(self, tensor: Tensor, code: str) -> RecordedTensor:
        """Return a tensor as something to compare."""
        return RecordedTensor(tensor, code, self._note_margin)

    def upstream(self, problem: Problem, rows: Tensor | None = None) -> Tensor:
        """Return numbers to multiply the output by, (B, L, D): small integers, and 0 outside `rows`, (B, L).

        rows: by default those with a key in every head, and all if the policy for the others is "zeros"; where that is
        all, the numbers are sometimes ones that share their memory, as in the backward pass of `output.sum()`.
        They lie in memory one way or another, as gradients do.
        """
        if rows is None and self.claims.empty_row != "zeros":
            rows = problem.allowed(self.claims.causal).any(-1).all(1)
        batch, _, queries, _ = problem.shape
        shape = (batch, queries, problem.config.d_model)
        if rows is None and self.case.seed % 4 == 3:
            return problem.query.new_ones(()).expand(shape)
        drawn = torch.randint(-2, 3, shape, generator=self.case.generator).to(problem.query)
        if rows is not None:
            drawn = (computable(drawn) * rows.unsqueeze(-1).to(drawn.device)).to(drawn)
        return lay_out(("contiguous", "transposed", "column_major", "sliced")[self.case.seed % 4], drawn)

    def expected(self, problem: Problem) -> Expected:
        """Return the right answer and its bound."""
        with torch.inference_mode():
            return oracle(problem, self.claims)

    def expected_gradients(self, problem: Problem, upstream: Tensor) -> dict[str, Ball]:
        """Return the right gradients and their bounds, under the names of `gradients`."""
        with torch.inference_mode():
            return sum_shared(problem, gradients(problem, self.claims, upstream))

    def _note_margin(self, margin: float) -> None:
        self.margin = max(self.margin, margin)

    def _call(self, step: CallStep, built: Instance, dtypes: tuple[torch.dtype, ...]) -> RecordedOutput:
        problem, number, training = step.problem, step.number, MODES[step.mode].training
        # Not where it is in that mode already: what it keeps until the mode changes must be right until then.
        kept = self._modes.get(built.number) is training and getattr(built.attention, "training", None) is training
        step = replace(step, switches=not kept)
        given = {"query": problem.query, "key": problem.key, "value": problem.value, "mask": problem.mask}
        versions = {name: tensor._version for name, tensor in given.items() if tensor is not None}
        settings = [(name, getattr(torch, name)(), restore) for name, restore in SETTINGS.items()]
        randomness = nullcontext() if step.seed is None else torch.random.fork_rng()
        with self._step(step), guarded(CALL), randomness:
            if step.seed is not None:
                torch.manual_seed(step.seed)
            if step.switches:
                _ = built.attention.train() if training else built.attention.eval()
                self._modes[built.number] = training
            returned = built.attention(
                problem.query,
                problem.key,
                problem.value,
                mask=problem.mask,
                is_causal=problem.is_causal,
                need_weights=step.need_weights,
            )
        changed = [(name, value) for name, value, _ in settings if getattr(torch, name)() != value]
        for _, value, restore in settings:
            restore(value)
        require_untouched(self.implementation)
        for name, value in changed:
            check = f"assert torch.{name}() == {value!r}"
            raise Violation(f"the call changed torch.{name}() from {value}", (check,), family="STA")
        for name, version in versions.items():
            tensor = given[name]
            if tensor is not None and tensor._version != version:
                check = f"assert {name}_{number}._version == 0, 'changed in place'"
                raise Violation(f"the call changed its {name} in place", (check,), family="STA")
        output, weights = getattr(returned, "output", None), getattr(returned, "weights", None)
        if output is None:
            check = f"assert isinstance(output_{number}, torch.Tensor)"
            told = f"the call returned {returned!r:.200}, but should return Output(output, weights)"
            raise Violation(told, (check,), family="SHP")
        require_plain(f"output_{number}", output, dtypes, problem.query.device, problem.query.shape)
        seen = self.record(output, f"output_{number}")
        if not step.need_weights or weights is None:
            return RecordedOutput(seen, None)
        if self.claims.returns_weights:
            shape = (*problem.shape[:3], problem.shape[3] + problem.config.extra_keys)
            require_plain(f"weights_{number}", weights, dtypes, problem.query.device, shape)
        return RecordedOutput(seen, self.record(weights, f"weights_{number}"))

    @property
    def steps(self) -> list[Step]:
        """What was done, in order; a step that raised is only there if it was the last."""
        return self._done if self._last is None else [*self._done, self._last]

    @contextmanager
    def _step(self, step: Step) -> Iterator[None]:
        self._last = step
        yield
        self._done.append(step)
        self._last = None
