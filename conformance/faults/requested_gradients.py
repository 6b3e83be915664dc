"""Faults that GRD-5, GRD-9 and GRD-10 must catch: some gradients only, or gradients of these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mha.conformance.faults.base import Complete
from mha.conformance.faults.families import hooked
from mha.conformance.faults.fault import fault
from mha.spec import Output


@fault("GRD-5", caught_by="frozen_weights_change_no_gradient")
class NoGraphForTheMaskAlone(Complete):
    """Where neither inputs nor weights require a gradient, none is recorded, so that a learned bias
    has none.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        needed = any(x.requires_grad for x in (query, key, value, *self.parameters()))
        with torch.set_grad_enabled(needed and torch.is_grad_enabled()):
            return super().attend(query, key, value, *rest)


@fault("GRD-5", dtype="bfloat16", caught_by="half_gradients_are_there_for_any_subset")
@fault(
    "GRD-5", caught_by="frozen_weights_change_no_gradient", trigger="frozen weights, trained keys"
)
class RecordedForTheQuery(Complete):
    """Gradients are recorded only if the query or its projection requires one."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        needed = query.requires_grad or self.w_q.requires_grad
        with torch.set_grad_enabled(needed and torch.is_grad_enabled()):
            return super().attend(query, *rest)


@fault("GRD-5", dtype="bfloat16", caught_by="half_gradients_are_there_for_any_subset")
@fault("GRD-5", caught_by="any_subset_has_the_same_gradients")
class ValueAloneForgotten(Complete):
    """The value has no gradient unless the key requires one."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        if not key.requires_grad:
            value = value.detach()
        return super().attend(query, key, value, *rest)


@fault("GRD-5", dtype="bfloat16", caught_by="half_gradients_are_there_for_any_subset")
@fault("GRD-5", caught_by="any_subset_has_the_same_gradients")
class WeightsAloneForgotten(Complete):
    """A projection has no gradient unless its input requires one."""

    def project(self, x: Tensor, role: str) -> Tensor:
        if x.requires_grad:
            return super().project(x, role)
        return super().project(x, role).detach()


@fault("GRD-5", dtype="float16", caught_by="half_gradients_are_there_for_any_subset")
@fault("GRD-5", caught_by="frozen_weights_change_no_gradient")
class FrozenForgotten(Complete):
    """The query has no gradient if its projection is frozen."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        if not self.w_q.requires_grad:
            q = q.detach()
        return super().score(q, k)


@fault("GRD-5", caught_by="recording_changes_no_output")
class AnotherScaleWhenRecorded(Complete):
    """The output is scaled differently if the query requires a gradient."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights, _ = super().attend(query, *rest)
        return Output(output * (1.01 if query.requires_grad else 1.0), weights)


@fault(
    "GRD-9",
    dtype="float64",
    caught_by="gradgradcheck_passes",
    script_shows=False,
    trigger="second derivatives",
)
class GradientOfScoresDetached(Complete):
    """The gradient of the scores is computed from copies, so that its own derivatives are lost."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(hooked(scores + 0.0, Tensor.detach), allowed)


@fault(
    "GRD-9",
    caught_by="gradients_that_can_be_differentiated_are_within_the_bound",
    script_shows=False,
    trigger="create_graph=True",
)
class AnotherScaleWithGraph(Complete):
    """The gradient is too large by 1% if the backward pass is recorded."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights, _ = super().attend(query, *rest)

        def changed(gradient: Tensor) -> Tensor:
            return gradient * (1.01 if torch.is_grad_enabled() else 1.0)

        return Output(hooked(output, changed), weights)


@fault(
    "GRD-5",
    caught_by="frozen_weights_change_no_gradient",
    trigger="frozen weights, and inputs without gradients",
)
class AnotherScaleWhenFrozen(Complete):
    """Where nothing requires a gradient, the output is scaled differently."""

    def attend(self, *inputs: Any) -> Output:
        output, weights, _ = super().attend(*inputs)
        if torch.is_grad_enabled() and not output.requires_grad:
            output = output * 1.01
        return Output(output, weights)


@fault(
    "GRD-10",
    script_shows=False,
    trigger="a second backward pass",
    source="https://github.com/linkedin/Liger-Kernel/issues/272",
)
class GradientWrittenInPlace(Complete):
    """The backward pass multiplies what it has saved in place: the second pass finds a product
    there.
    """

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights, _ = super().attend(query, *rest)
        saved = torch.ones_like(output)
        return Output(hooked(output, lambda gradient: gradient * saved.mul_(1.5) / 1.5), weights)
