"""A session: one implementation on one case, every step recorded so that a failure can be reported
and repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.memory_layouts import copy_of, lay_out
from mha.conformance.cases.modes import MODES
from mha.conformance.harness import oracle_answers
from mha.conformance.harness.amx_defect import may_mix_rows
from mha.conformance.harness.differentiation import differentiate
from mha.conformance.harness.errors import CALL, Discard, Violation
from mha.conformance.harness.integrity import require_untouched
from mha.conformance.harness.isolation import guarded, require_gradients, require_plain
from mha.conformance.harness.plain import (
    Given,
    config_given,
    copied,
    version_of,
    viewed,
    weights_given,
)
from mha.conformance.harness.recording import (
    BuildStep,
    CallStep,
    DeriveStep,
    RecordedOutput,
    RecordedTensor,
    Step,
)
from mha.conformance.sharding.gathered import claims_on_ranks, on_ranks
from mha.implementations.adapters.compiled import compiled_again
from mha.implementations.adapters.construction import Room
from mha.implementations.discovery.loaded import attribute
from mha.implementations.discovery.resolve import with_room
from mha.implementations.process.pristine import as_found
from mha.spec import (
    Attention,
    Claims,
    Config,
    Expected,
    Implementation,
    Lse,
    Problem,
    Weights,
)
from mha.spec.bounds import Ball
from mha.spec.dtypes import computable, traits_of
from mha.spec.masks import INTEGERS
from mha.spec.problem import INPUTS

# Settings of torch that would spoil every later call if one left them changed; STA-5 checks more.
SETTINGS: dict[str, Callable[[Any], Any]] = {
    "get_default_dtype": torch.set_default_dtype,
    "is_grad_enabled": torch.set_grad_enabled,
    "get_num_threads": torch.set_num_threads,
}
# How the gradient of an output may lie in memory.
UPSTREAM_LAYOUTS = ("contiguous", "transposed", "column_major", "sliced")


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

    latest: the attention that was built last. margin: the largest error/bound of all comparisons
        with a bound so far.
    scripted: whether a script that repeats the steps shows what the property checks. given: what
        judged code gets.
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
        torch.default_generator.manual_seed(
            case.seed
        )  # `torch.manual_seed` looks for other devices first
        if case.device != "cpu":
            torch.cuda.manual_seed(case.seed)  # as above; the only other device is CUDA

    @property
    def steps(self) -> list[Step]:
        """The steps so far, in order; one that raised is included only if it was the last."""
        return self._done if self._last is None else [*self._done, self._last]

    def build(self, config: Config, weights: Weights) -> Instance:
        """Build an attention with these weights; raises CallRaised."""
        dtype, step = (
            getattr(torch, self.case.dtype),
            BuildStep(len(self._done) + 1, config, weights),
        )
        with self._step(step), guarded(f"build({config})"):
            implementation = on_ranks(self.implementation, self.case.ranks)
            roomy = with_room(implementation, Room.for_calls(self._longest, self._most_items))
            given = config_given(config), weights_given(weights)
            built = roomy.build(*given, dtype=dtype, device=self.case.device)
            self.latest = Instance(step.number, built)
            return self.latest

    def built(self, problem: Problem) -> Instance:
        """Return the attention with the configuration and the weights of a problem, built at the
        first use.
        """
        key = problem.config, id(problem.weights)
        if key not in self._built:
            self._built[key] = self.fresh(problem)
        return self._built[key]

    def fresh(self, problem: Problem) -> Instance:
        """Build another attention with the configuration and the weights of a problem; raises
        CallRaised.
        """
        self._require_claimed_sizes(problem)
        self._longest = max(self._longest, *problem.shape[2:])
        self._most_items = max(self._most_items, problem.shape[0])
        return self.build(problem.config, problem.weights)

    def derive(self, origin: Instance, change: Callable[[Any], Any], code: str) -> Instance:
        """Make an attention out of another; `code` is the change, with {} for the attention. Raises
        CallRaised.
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

        Returns the output (B, L, D) and the weights (B, H, L, S or more), without history. via: the
        attention to call, by default that of the problem. seed: set before the call. dtypes: those
        that the result may have, by default that of the query. Raises CallRaised, and Violation for
        a result that is not as the contract describes it.
        """
        wants_weights = self.case.need_weights if need_weights is None else need_weights
        instance = via or self.built(
            problem
        )  # built as users build it, outside the modes of the call
        given = self.in_a_claimed_form(problem)
        step = CallStep(
            len(self._done) + 1, instance.number, given, wants_weights, mode or self.case.mode, seed
        )
        with MODES[step.mode].enter(self.case.device):
            result = self._call(step, instance, dtypes or (problem.query.dtype,))
        weights, lse = (part and part.detached() for part in (result.weights, result.lse))
        return RecordedOutput(result.output.detached(), weights, lse)

    def gradients(
        self,
        problem: Problem,
        upstream: Tensor,
        wanted: Sequence[str] = (*INPUTS, "mask"),
        *,
        frozen: bool = False,
    ) -> dict[str, RecordedTensor]:
        """Return the gradients of the sum of output * upstream by name, each in the shape of what
        it belongs to.

        They are those of the `wanted` inputs (inputs that are one tensor have one gradient, under
            the first name), of the mask if it is an additive one, and of the weights if the
            attention reports them; zeros where there is none.
        upstream: (B, L, D). frozen: the weights require no gradient, so theirs are left out.
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
        recorded = {
            name: self.record(
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, f"{name}_{number}.grad"
            )
            for name, leaf in leaves.distinct(chosen).items()
        }
        if frozen or not self.claims.weight_gradients:
            return recorded
        return recorded | self.weight_gradients(instance, problem.weights)

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
        """Return the output (B, L, D) with its history, for the property to differentiate; no
        script shows it.
        """
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
        """Return a tensor to be compared that no step of the session gives, so that no script shows
        it.
        """
        self.scripted = False
        return self.record(tensor, name)

    def upstream(self, problem: Problem, rows: Tensor | None = None) -> Tensor:
        """Return the gradient of the output (B, L, D): small integers, 0 outside `rows`, in one of
        several layouts.

        rows: boolean (B, L). By default these are the rows with a key in every head, or all if the
        policy for the others is "zeros"; where they are all, the gradient is sometimes a one that
        is expanded, as in the backward pass of `output.sum()`.
        """
        if rows is None and self.claims.empty_row != "zeros":
            rows = problem.allowed(self.claims.alignment).any(-1).all(1)
            if self.claims.empty_row == "nan" and not bool(rows.all()):
                raise Discard(
                    "a row is NaN by policy, and what that does to gradients is a matter of MSK-9"
                )
        batch, _, queries, _ = problem.shape
        shape = (batch, queries, problem.config.output_width)
        if rows is None and self.case.seed % 4 == 3:
            return problem.query.new_ones(()).expand(shape)
        drawn = torch.randint(-2, 3, shape, generator=self.case.generator).to(problem.query)
        if rows is not None:
            drawn = (computable(drawn) * rows.unsqueeze(-1).to(drawn.device)).to(drawn)
        return lay_out(UPSTREAM_LAYOUTS[self.case.seed % 4], drawn)

    def expected(self, problem: Problem, claims: Claims | None = None) -> Expected:
        """Return the oracle's output and weights, with their bounds; claims: other ones than are
        declared.
        """
        with torch.inference_mode():
            return oracle_answers.expected(problem, claims or self.claims)

    def bound_of(self, problem: Problem, index: Any = ...) -> Callable[[], Ball]:
        """Return what makes the oracle's output with its bounds, once, when it is first needed;
        index: of a part.

        It is for two results that are compared with each other. A row without an allowed key may be
        anything there, as a clause of its own says what it must be, and so has the bound of the
        same row without masks: that of an exact zero would call the rounding of what such a row got
        a difference.
        """

        def bound() -> Ball:
            expected = self.expected(problem)
            output, empty = expected.output, expected.empty.any(1).unsqueeze(-1)
            if bool(empty.any()):
                unmasked = self.expected(problem.change(mask=None, is_causal=False)).output
                output = Ball(
                    output.mid, output.rad.where(~empty, output.rad.maximum(unmasked.rad))
                )
            return output[index]

        return cache(bound)

    def expected_gradients(
        self, problem: Problem, upstream: Tensor, upstream_lse: Tensor | None = None
    ) -> dict[str, Ball]:
        """Return the oracle's gradients with their bounds, under the names of `gradients`."""
        with torch.inference_mode():
            return oracle_answers.expected_gradients(problem, self.claims, upstream, upstream_lse)

    def in_a_claimed_form(self, problem: Problem) -> Problem:
        """Return a problem with its boolean mask as integers, in half of the cases of what claims
        these.
        """
        mask, which = problem.mask, self.case.seed // 2 % len(INTEGERS)
        if (
            mask is None
            or mask.dtype != torch.bool
            or "int" not in self.claims.masks
            or self.case.seed % 2 == 0
        ):
            return problem
        return problem.change(mask=mask.to(INTEGERS[which]))

    def _note_margin(self, margin: float) -> None:
        self.margin = max(self.margin, margin)

    def _call(
        self, step: CallStep, instance: Instance, dtypes: tuple[torch.dtype, ...]
    ) -> RecordedOutput:
        """Call the attention, and check everything about the call that does not depend on the
        clause.
        """
        self._require_claimed_sizes(step.problem)
        if may_mix_rows(step.problem, self.claims, step.mode):
            raise Discard("torch's own products carry NaN from row to row on this CPU")
        problem = self.given.problem(step.problem)
        given = _tensors(problem)
        versions = {name: version_of(tensor) for name, tensor in given.items()}
        with as_found():
            settings = {name: getattr(torch, name)() for name in SETTINGS}
            returned = self._returned(step, instance, problem)
            changed = {
                name: value for name, value in settings.items() if getattr(torch, name)() != value
            }
            for name, value in changed.items():
                SETTINGS[name](value)
        require_untouched(self.implementation)
        for name, value in changed.items():
            assertion = f"assert torch.{name}() == {value!r}"
            raise Violation(
                f"the call changed torch.{name}() from {value}", (assertion,), family="STA"
            )
        for name, version in versions.items():
            if version_of(given[name]) != version:
                assertion = f"assert {name}_{step.number}._version == 0, 'changed in place'"
                raise Violation(f"the call changed its {name} in place", (assertion,), family="STA")
        return self._recorded(step, returned, dtypes)

    def _require_claimed_sizes(self, problem: Problem) -> None:
        """Discard the case if a property made sizes of it that are not claimed."""
        config, lengths = problem.config, (problem.query.shape[1], problem.key.shape[1])
        if refused := self.claims.sizes.refused(
            n_heads=config.n_heads, head_dim=config.head_dim, lengths=lengths
        ):
            raise Discard(refused)

    def _returned(
        self, step: CallStep, instance: Instance, problem: Problem
    ) -> tuple[Any, Any, Any, str]:
        """Call the attention in its mode; return output, weights, lse, and in words what it
        returned instead.

        problem: that of the step, in the objects that judged code is given.
        """
        training = MODES[step.mode].training
        # Not if it is in that mode already: what it keeps until the mode changes must hold until
        # then.
        kept = self._modes.get(instance.number) is training
        kept = kept and attribute(instance.attention, "training") is training
        step = replace(step, switches=False) if kept else step
        randomness = nullcontext() if step.seed is None else torch.random.fork_rng()

        def call() -> tuple[Any, Any, Any, str]:
            if step.seed is not None:
                torch.manual_seed(step.seed)
            if step.switches:
                _ = instance.attention.train() if training else instance.attention.eval()
                self._modes[instance.number] = training
            returned = problem.change(need_weights=step.need_weights).call(instance.attention)
            output, weights, lse = (
                getattr(returned, name, None) for name in ("output", "weights", "lse")
            )
            return output, weights, lse, f"{returned!r:.200}" if output is None else ""

        with self._step(step), guarded(CALL), randomness:
            return compiled_again(call)

    def _recorded(
        self, step: CallStep, returned: tuple[Any, Any, Any, str], dtypes: tuple[torch.dtype, ...]
    ) -> RecordedOutput:
        """Return what a call returned, once its shapes, dtypes and devices are as the contract
        describes them.
        """
        problem, number, (output, weights, lse, instead) = step.problem, step.number, returned
        if output is None:
            assertion = f"assert isinstance(output_{number}, torch.Tensor)"
            message = f"the call returned {instead}, but should return Output(output, weights)"
            raise Violation(message, (assertion,), family="SHP")
        require_plain(
            f"output_{number}", output, dtypes, problem.query.device, problem.output_shape
        )
        recorded = RecordedTensor(viewed(output), f"output_{number}", self._note_margin)
        recorded_lse = self._recorded_lse(step, lse) if problem.options.return_lse else None
        if not step.need_weights or not issubclass(type(weights), Tensor):
            return RecordedOutput(recorded, None, recorded_lse)
        if self.claims.returns_weights:
            shape = (*problem.shape[:3], problem.shape[3] + problem.config.extra_keys)
            # A softmax in float32 may return its weights as they are, beside an output that is cast
            # back.
            wider = (torch.float32,) if traits_of(dtypes[0]).half else ()
            require_plain(
                f"weights_{number}", weights, (*dtypes, *wider), problem.query.device, shape
            )
        recorded_weights = RecordedTensor(viewed(weights), f"weights_{number}", self._note_margin)
        return RecordedOutput(recorded, recorded_weights, recorded_lse)

    def _recorded_lse(self, step: CallStep, lse: Any) -> RecordedTensor:
        """Return the log-sum-exp that a call returned, once its shape, dtype and device are as they
        are claimed.
        """
        code, problem, declared = f"lse_{step.number}", step.problem, self.claims.lse or Lse()
        if not issubclass(type(lse), Tensor):
            assertion = f"assert isinstance({code}, torch.Tensor)"
            raise Violation(
                "the call returned no log-sum-exp, though it was asked for",
                (assertion,),
                family="LSE",
            )
        dtypes = declared.dtypes_for(problem.query.dtype)
        require_plain(code, lse, dtypes, problem.query.device, problem.shape[:3])
        return RecordedTensor(viewed(lse), code, self._note_margin)

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
    """Return the problem with copies of its inputs, and the names of those that require a gradient."""
    chosen = [name for name in wanted if name != "mask"]
    leaves, mask = problem.map_inputs(copy_of), problem.mask
    if mask is not None and "mask" in wanted and mask.is_floating_point():
        leaves = leaves.change(mask=copy_of(mask))
        chosen.append("mask")
    for name in chosen:
        getattr(leaves, name).requires_grad_()
    return leaves, chosen
