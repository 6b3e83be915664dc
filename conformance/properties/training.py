"""CMP-5, CMP-6: attention in training that saves memory, or is to be repeated to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, DENSE, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.mask_kinds import COMMON
from mha.conformance.cases.memory_layouts import leaf_of
from mha.conformance.cases.transforms import with_dropout
from mha.conformance.harness.assertions import expect_agree, expect_close, expect_equal
from mha.conformance.harness.differentiation import differentiate
from mha.conformance.harness.errors import CallRaised, Discard
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.recording import RecordedTensor
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.shared_assertions import (
    input_gradients,
    undetermined_gradients,
)
from mha.spec import Output, Problem
from mha.spec.bounds import Ball

TRAINING = Domain(
    masks=COMMON,
    causal=BOTH,
    values=MODERATE,
    layouts=DENSE,
    modes=WITH_GRADIENT,
    need_weights=(False,),
    dtypes=BOUNDED,
    max_length=17,
)
# Half of the weights are dropped, and the others doubled: once in the output, and once more in its
# gradients.
PROBABILITY, GROWTH = 0.5, 4.0


@dataclass(eq=False)
class _Checkpointed:
    """An attention whose forward pass is computed again in the backward pass."""

    attention: Any
    use_reentrant: bool

    def train(self) -> None:
        self.attention.train()

    def eval(self) -> None:
        self.attention.eval()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Output:
        def output_of(*inputs: Tensor) -> Tensor:
            output: Tensor = self.attention(*inputs, **options).output
            return output

        return Output(checkpoint(output_of, query, key, value, use_reentrant=self.use_reentrant))


def _change(use_reentrant: bool) -> Callable[[Any], Any]:
    """Return what makes a checkpointed attention of another."""
    return lambda attention: _Checkpointed(attention, use_reentrant)


@property_of(
    "CMP-5", TRAINING, needs=("composes=checkpoint", "gradients"), requires="HED-1", max_cases=10
)
def checkpointing_changes_nothing(session: Session, case: Case) -> None:
    """Outputs and gradients of a checkpointed call are the oracle's."""
    problem = case.problem()
    upstream = session.upstream(problem)
    for use_reentrant in (False, True):
        results = _trained(session, problem, upstream, _change(use_reentrant))
        how = f"checkpointed, use_reentrant={use_reentrant}"
        _expect_oracle(session, problem, upstream, results, how)


@property_of(
    "CMP-5",
    TRAINING,
    needs=("composes=checkpoint", "gradients", "dropout"),
    requires="DRP-3",
    max_cases=6,
    number=2,
)
def checkpointing_draws_the_same(session: Session, case: Case) -> None:
    """With dropout a checkpointed call gives what a plain one gives from the same seed."""
    problem = case.problem()
    upstream = session.upstream(problem)
    dropping = with_dropout(problem, PROBABILITY)
    plain = _trained(session, dropping, upstream)
    forms = {}
    for use_reentrant in (False, True):
        forms[use_reentrant] = _trained(session, dropping, upstream, _change(use_reentrant))
    reach = session.expected_gradients(problem, GROWTH * upstream)
    output = session.expected(problem).output
    reach["output"] = Ball(output.mid, GROWTH * output.rad)
    for use_reentrant, results in forms.items():
        because = (
            f"that of a plain call from the same seed (checkpointed, use_reentrant={use_reentrant})"
        )
        for name, result in results.items():
            expect_agree(result, plain[name], _bound(reach[name]), because=because)


@property_of(
    "CMP-6", TRAINING, needs=("composes=deterministic", "gradients"), requires="HED-1", max_cases=10
)
def deterministic_results_have_equal_bits(session: Session, case: Case) -> None:
    """Under deterministic algorithms two calls give the same bits, and the oracle's results."""
    problem = case.problem()
    upstream = session.upstream(problem)
    with _deterministic_algorithms():
        try:
            first = _trained(session, problem, upstream)
            second = _trained(session, problem, upstream)
        except CallRaised as refused:
            raise Discard("it raises under deterministic algorithms") from refused
    _expect_oracle(
        session, problem, upstream, first, "under torch.use_deterministic_algorithms(True)"
    )
    for name, result in second.items():
        expect_equal(
            result, first[name], because="the same call before, under deterministic algorithms"
        )


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    """Let torch use deterministic algorithms, and fill new memory with NaN, in the block."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _trained(
    session: Session, problem: Problem, upstream: Tensor, change: Callable[[Any], Any] | None = None
) -> dict[str, RecordedTensor]:
    """Return the output of a call with the seed of the case, and its gradients, by name.

    change: what is done to the attention before the call.
    """
    leaves = problem.map_inputs(leaf_of)
    instance = session.fresh(problem)
    via = instance if change is None else session.derive(instance, change, "checkpointed({})")
    with torch.random.fork_rng():
        torch.manual_seed(session.case.seed)
        output = session.forward(leaves, via=via)
        with guarded("backward()"):
            differentiate(output, upstream)
    results = {
        "output": session.unscripted(output.detach(), "output"),
        **input_gradients(session, leaves),
    }
    if session.claims.weight_gradients:
        gradients = session.weight_gradients(instance, problem.weights)
        for name in sorted(gradients.keys() - undetermined_gradients(session, problem)):
            results[name] = gradients[name]
    return results


def _expect_oracle(
    session: Session,
    problem: Problem,
    upstream: Tensor,
    results: dict[str, RecordedTensor],
    how: str,
) -> None:
    """Expect the oracle's output and gradients; how: what was done to the attention."""
    expected = session.expected_gradients(problem, upstream)
    expected["output"] = session.expected(problem).output
    for name, result in results.items():
        expect_close(result, expected[name], because=f"the oracle's value ({how})")


def _bound(ball: Ball) -> Callable[[], Ball]:
    return lambda: ball
