"""A session: one implementation on one case, with every step recorded to report a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.memory_layouts import copy_of
from mha.conformance.cases.modes import MODES
from mha.conformance.harness import oracle_answers
from mha.conformance.harness.amx_defect import may_mix_rows
from mha.conformance.harness.differentiation import differentiate, upstream_of
from mha.conformance.harness.errors import CALL, Discard, Violation
from mha.conformance.harness.integrity import require_untouched
from mha.conformance.harness.isolation import guarded, require_gradients
from mha.conformance.harness.plain import Given, config_given, copied, version_of, weights_given
from mha.conformance.harness.recording import (
    BuildStep,
    CallStep,
    DeriveStep,
    RecordedOutput,
    RecordedTensor,
    Step,
)
from mha.conformance.harness.returned import Returned, recorded
from mha.conformance.sharding.gathered import claims_on_ranks, on_ranks
from mha.implementations.adapters.compiled import compiled_again
from mha.implementations.adapters.construction import Room
from mha.implementations.discovery.loaded import attribute
from mha.implementations.discovery.resolve import with_room
from mha.implementations.process.pristine import as_found
from mha.spec import Attention, Claims, Config, Expected, Implementation, Problem, Weights
from mha.spec.bounds import Ball
from mha.spec.masks import INTEGERS
from mha.spec.problem import INPUTS

# Settings of torch that would spoil every later call if one left them changed; STA-5 checks more.
SETTINGS: dict[str, Callable[[Any], Any]] = {
    "get_default_dtype": torch.set_default_dtype,
    "is_grad_enabled": torch.set_grad_enabled,
    "get_num_threads": torch.set_num_threads,
}


@dataclass(frozen=True, eq=False)
class Instance:
    """An attention of the session; `attention_1` in its script is the one of number 1."""

    number: int
    attention: Attention


class Session:
    """The implementation under test, bound to a case: its modes, its device, its dtype, its ranks.

    Calling a session with a problem calls the attention and returns a `RecordedOutput`; whatever
    the implementation raises becomes a `CallRaised`. A new session seeds torch with the seed of its
    case, so that random numbers do not depend on what was judged before.

    latest: the attention that was built last.
    margin: the largest error/bound of all comparisons with a bound so far.
    scripted: whether a script that repeats the steps shows what the property checks.
    given: what judged code gets.
    """

    def __init__(self, implementation: Implementation, case: Case) -> None:
        self.implementation, self.case = implementation, case
        self.claims = claims_on_ranks(implementation.claims, case.ranks)
        self._done: list[Step] = []
        self._last: Step | None = None
        self._built: dict[tuple[Config, int], Instance] = {}
        self._modes: dict[int, bool] = {}
        self.latest: Instance
        self._longest, self._most_items = max(case.L, case.S), case.B
        self.margin, self.scripted = 0.0, True
        self.given = Given()
        # Not `torch.manual_seed`, which looks for other devices first; the only one is CUDA.
        torch.default_generator.manual_seed(case.seed)
        if case.device != "cpu":
            torch.cuda.manual_seed(case.seed)

    @property
    def steps(self) -> list[Step]:
        """The steps so far, in order; one that raised is included only if it was the last."""
        return self._done if self._last is None else [*self._done, self._last]

    def build(self, config: Config, weights: Weights) -> Instance:
        """Build an attention with these weights; raises CallRaised."""
        dtype: torch.dtype = getattr(torch, self.case.dtype)
        step = BuildStep(len(self._done) + 1, config, weights)
        with self._step(step), guarded(f"build({config})"):
            implementation = on_ranks(self.implementation, self.case.ranks)
            roomy = with_room(implementation, Room.for_calls(self._longest, self._most_items))
            given = config_given(config), weights_given(weights)
            built = roomy.build(*given, dtype=dtype, device=self.case.device)
            self.latest = Instance(step.number, built)
            return self.latest

    def built(self, problem: Problem) -> Instance:
        """Return the attention of a problem's configuration and weights, built at the first use."""
        key = problem.config, id(problem.weights)
        if key not in self._built:
            self._built[key] = self.fresh(problem)
        return self._built[key]

    def fresh(self, problem: Problem) -> Instance:
        """Build another attention of a problem's configuration and weights; raises CallRaised."""
        self._require_claimed_sizes(problem)
        self._longest = max(self._longest, *problem.shape[2:])
        self._most_items = max(self._most_items, problem.shape[0])
        return self.build(problem.config, problem.weights)

    def derive(self, origin: Instance, change: Callable[[Any], Any], code: str) -> Instance:
        """Make an attention out of another; raises CallRaised.

        code: the change, with {} for the attention.
        """
        step = DeriveStep(len(self._done) + 1, origin.number, code)
        with self._step(step), guarded(code.format("attention")):
            return Instance(step.number, change(origin.attention))

    def frozen(self, origin: Instance) -> Instance:
        """Freeze the weights of an attention that is a torch.nn.Module."""
        return self.derive(
            origin, lambda module: module.requires_grad_(False), "{}.requires_grad_(False)"
        )

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
        """Call the attention in the mode of the case, with weights if the case has them, unless
        others are given.

        Returns the output (B, L, D) and the weights (B, H, L, S or more), without history.

        via: the attention to call, by default that of the problem.
        seed: set before the call.
        dtypes: those that the result may have, by default that of the query.

        Raises CallRaised, and Violation for a result that is not as the contract describes it.
        """
        wants_weights = self.case.need_weights if need_weights is None else need_weights
        # Built as users build it, outside the modes of the call.
        instance = via or self.built(problem)
        given = self.in_a_claimed_form(problem)
        number, mode = len(self._done) + 1, mode or self.case.mode
        step = CallStep(number, instance.number, given, wants_weights, mode, seed)
        with MODES[step.mode].enter(self.case.device):
            result = self._call(step, instance, dtypes or (problem.query.dtype,))
        return result.detached()

    def gradients(
        self,
        problem: Problem,
        upstream: Tensor,
        wanted: Sequence[str] = (*INPUTS, "mask"),
        *,
        frozen: bool = False,
    ) -> dict[str, RecordedTensor]:
        """Return the gradients of the sum of output * upstream by name, zeros where there is none.

        They are those of the `wanted` inputs (inputs that are one tensor have one gradient, under
        the first name), of the mask if it is an additive one, and of the weights if the attention
        reports them.

        upstream: (B, L, D).
        frozen: the weights require no gradient, so theirs are left out.
        """
        leaves, chosen = _leaves(self.in_a_claimed_form(problem), wanted)
        instance = self.fresh(problem)
        if frozen:
            instance = self.frozen(instance)
        number = len(self._done) + 1
        step = CallStep(
            number,
            instance.number,
            leaves,
            self.case.need_weights,
            self.case.mode,
            None,
            upstream,
            tuple(chosen),
        )
        with MODES[step.mode].enter(self.case.device):
            output = self._call(step, instance, (upstream.dtype,)).output.tensor
        with guarded("backward()"):
            if output.requires_grad:
                differentiate(output, upstream)
        found = dict[str, RecordedTensor]()
        for name, leaf in leaves.distinct(chosen).items():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            found[name] = self.record(gradient, f"{name}_{number}.grad")
        if frozen or not self.claims.weight_gradients:
            return found
        return found | self.weight_gradients(instance, problem.weights)

    def weight_gradients(self, instance: Instance, weights: Weights) -> dict[str, RecordedTensor]:
        """Return the gradients of the weights by name, as the attention reports them."""
        code = f"attention_{instance.number}.weight_gradients()"
        with guarded(code):
            reported = dict(instance.attention.weight_gradients())  # type: ignore[attr-defined]  # it is claimed
        require_gradients(code, reported, weights)
        return {
            name: self.record(reported[name], f"{code}[{name!r}]") for name, _ in weights.named()
        }

    def forward(self, problem: Problem, via: Instance | None = None) -> Tensor:
        """Return the output (B, L, D) with its history, to differentiate; no script shows it."""
        return self.forward_all(problem, via).output.tensor

    def forward_all(self, problem: Problem, via: Instance | None = None) -> RecordedOutput:
        """Return all that a call returns, with its history; no script shows it."""
        self.scripted = False
        instance = via or self.built(problem)
        given = self.in_a_claimed_form(problem)
        step = CallStep(len(self._done) + 1, instance.number, given, False, self.case.mode)
        return self._call(step, instance, (problem.query.dtype,))

    def record(self, tensor: Tensor, code: str) -> RecordedTensor:
        """Return a tensor to be compared; `code` names it in the script."""
        return RecordedTensor(copied(tensor), code, self._note_margin)

    def unscripted(self, tensor: Tensor, name: str) -> RecordedTensor:
        """Return a tensor to be compared that no step gives, so that no script shows it."""
        self.scripted = False
        return self.record(tensor, name)

    def upstream(self, problem: Problem, rows: Tensor | None = None) -> Tensor:
        """Return a gradient of the output for this case; see `upstream_of`."""
        return upstream_of(self.case, self.claims, problem, rows)

    def expected(self, problem: Problem, claims: Claims | None = None) -> Expected:
        """Return the oracle's output and weights, with their bounds.

        claims: others than are declared.
        """
        with torch.inference_mode():
            return oracle_answers.expected(problem, claims or self.claims)

    def bound_of(self, problem: Problem, index: Any = ...) -> Callable[[], Ball]:
        """Return what makes the oracle's output with its bounds, once, when it is first needed.

        It is for two results that are compared with each other. A row without an allowed key may be
        anything there, as a clause of its own says what it must be, and so has the bound of the
        same row without masks: that of an exact zero would call the rounding of what such a row got
        a difference.

        index: of a part.
        """

        def bound() -> Ball:
            expected = self.expected(problem)
            output, empty = expected.output, expected.empty.any(1).unsqueeze(-1)
            if bool(empty.any()):
                unmasked = self.expected(problem.change(mask=None, is_causal=False)).output
                larger = output.rad.maximum(unmasked.rad)
                output = Ball(output.mid, output.rad.where(~empty, larger))
            return output[index]

        return cache(bound)

    def expected_gradients(
        self, problem: Problem, upstream: Tensor, upstream_lse: Tensor | None = None
    ) -> dict[str, Ball]:
        """Return the oracle's gradients with their bounds, under the names of `gradients`."""
        with torch.inference_mode():
            return oracle_answers.expected_gradients(problem, self.claims, upstream, upstream_lse)

    def in_a_claimed_form(self, problem: Problem) -> Problem:
        """Return a problem with its boolean mask as integers, in half of the cases, if claimed."""
        mask, seed = problem.mask, self.case.seed
        if mask is None or mask.dtype != torch.bool:
            return problem
        if "int" not in self.claims.masks or seed % 2 == 0:
            return problem
        return problem.change(mask=mask.to(INTEGERS[seed // 2 % len(INTEGERS)]))

    def _note_margin(self, margin: float) -> None:
        self.margin = max(self.margin, margin)

    def _call(
        self, step: CallStep, instance: Instance, dtypes: tuple[torch.dtype, ...]
    ) -> RecordedOutput:
        """Call the attention, and check all about the call that does not depend on the clause."""
        self._require_claimed_sizes(step.problem)
        if may_mix_rows(step.problem, self.claims, step.mode):
            raise Discard("torch's own products carry NaN from row to row on this CPU")
        problem = self.given.problem(step.problem)
        given = _tensors(problem)
        versions = {name: version_of(tensor) for name, tensor in given.items()}
        with as_found():
            settings = {name: getattr(torch, name)() for name in SETTINGS}
            returned = self._returned(step, instance, problem)
            changed = dict[str, Any]()
            for name, value in settings.items():
                if getattr(torch, name)() != value:
                    SETTINGS[name](value)
                    changed[name] = value
        require_untouched(self.implementation)
        for name, value in changed.items():
            assertion = f"assert torch.{name}() == {value!r}"
            message = f"the call changed torch.{name}() from {value}"
            raise Violation(message, (assertion,), family="STA")
        for name, version in versions.items():
            if version_of(given[name]) != version:
                assertion = f"assert {name}_{step.number}._version == 0, 'changed in place'"
                raise Violation(f"the call changed its {name} in place", (assertion,), family="STA")
        return self._recorded(step, returned, dtypes)

    def _recorded(
        self, step: CallStep, returned: Returned, dtypes: tuple[torch.dtype, ...]
    ) -> RecordedOutput:
        return recorded(step, returned, dtypes, self.claims, self._note_margin)

    def _require_claimed_sizes(self, problem: Problem) -> None:
        """Discard the case if a property made sizes of it that are not claimed."""
        config, lengths = problem.config, (problem.query.shape[1], problem.key.shape[1])
        refused = self.claims.sizes.refused(
            n_heads=config.n_heads, head_dim=config.head_dim, lengths=lengths
        )
        if refused:
            raise Discard(refused)

    def _returned(self, step: CallStep, instance: Instance, problem: Problem) -> Returned:
        """Call the attention in its mode.

        problem: that of the step, in the objects that judged code is given.
        """
        training = MODES[step.mode].training
        # Not if it is in that mode already: what it keeps until the mode changes must hold until
        # then.
        kept = self._modes.get(instance.number) is training
        if kept and attribute(instance.attention, "training") is training:
            step = replace(step, switches=False)
        randomness = nullcontext() if step.seed is None else torch.random.fork_rng()

        def call() -> Returned:
            if step.seed is not None:
                torch.manual_seed(step.seed)
            if step.switches:
                if training:
                    instance.attention.train()
                else:
                    instance.attention.eval()
                self._modes[instance.number] = training
            result = problem.change(need_weights=step.need_weights).call(instance.attention)
            return Returned.of(result)

        with self._step(step), guarded(CALL), randomness:
            return compiled_again(call)

    @contextmanager
    def _step(self, step: Step) -> Iterator[None]:
        self._last = step
        yield
        self._done.append(step)
        self._last = None


def _tensors(problem: Problem) -> Mapping[str, Tensor]:
    """Return the inputs of a problem and its mask, if there is one."""
    given = {name: getattr(problem, name) for name in (*INPUTS, "mask")}
    return {name: tensor for name, tensor in given.items() if tensor is not None}


def _leaves(problem: Problem, wanted: Sequence[str]) -> tuple[Problem, list[str]]:
    """Return the problem with copies of its inputs, and the names of the leaves among them."""
    chosen = [name for name in wanted if name != "mask"]
    leaves, mask = problem.map_inputs(copy_of), problem.mask
    if mask is not None and "mask" in wanted and mask.is_floating_point():
        leaves = leaves.change(mask=copy_of(mask))
        chosen.append("mask")
    for name in chosen:
        getattr(leaves, name).requires_grad_()
    return leaves, chosen
