"""Faults that CMP must catch: `torch.compile`, `torch.export`, tracing, and autocast."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.base import CLAIMS, Complete
from mha.conformance.faults.families import drops_in_evaluation, mask_ignored, scores_scaled
from mha.conformance.faults.fault import fault
from mha.spec import Config, Weights


@fault(
    "CMP-1",
    caught_by="compiled_agrees_with_eager",
    trigger="compiled",
    source="https://github.com/pytorch/pytorch/issues/174049",
)
class AnotherScaleCompiled(scores_scaled(1.1, when=lambda module: torch.compiler.is_compiling())):
    """The scale is different under `torch.compile`."""


@fault("CMP-1", trigger="compiled", source="https://github.com/pytorch/pytorch/issues/195320")
class AnotherResultCompiled(Complete):
    """Under `torch.compile` the contexts are too large by 10%."""

    def merge(self, x: Tensor) -> Tensor:
        return super().merge(x) * (1.1 if torch.compiler.is_compiling() else 1.0)


@fault("CMP-1", caught_by="compiled_agrees_with_eager", trigger="compiled, no_grad")
class ScaledAgainInCompiledInference(Complete):
    """Compiled without gradients, the scores are scaled twice."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        again = torch.compiler.is_compiling() and not torch.is_grad_enabled()
        return super().score(q, k) * (self.config.head_dim**-0.5 if again else 1.0)


@fault(
    "CMP-1",
    caught_by="compiled_mask_agrees",
    trigger="compiled, with a mask",
    source="https://github.com/torch-spyre/torch-spyre/issues/4526",
)
class MaskForgottenCompiled(mask_ignored(when=lambda q, options: torch.compiler.is_compiling())):
    """The mask is ignored under `torch.compile`."""


@fault("CMP-1", caught_by="compiled_mask_agrees", trigger="compiled, a row without keys")
class RowsGuardedIfEager(Complete):
    """Rows without a key are looked for only where that needs no break of the graph."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return scores.masked_fill(~allowed, -math.inf).softmax(-1)
        return super().weigh(scores, allowed)


@fault(
    "CMP-1", trigger="compiled", source="https://github.com/facebookresearch/xformers/issues/765"
)
class GraphBroken(Complete):
    """Part of the call silently runs uncompiled."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().weigh(scores, allowed)


@torch.library.custom_op("mha_faults::column_major", mutates_args=())
def _column_major(x: Tensor) -> Tensor:
    return x.mT.clone(memory_format=torch.contiguous_format).mT


_column_major.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
_column_major.register_autograd(lambda _, gradient: gradient)


@fault("CMP-1", caught_by="generated_code_without_gradients_agrees", script_shows=False)
@fault(
    "CMP-1",
    caught_by="generated_code_agrees",
    claims=replace(CLAIMS, composes={"compile"}),
    script_shows=False,
    trigger="compiled, with generated code",
)
class WrongStridesCompiled(Complete):
    """A kernel of its own returns other strides than it declares to the compiler."""

    def merge(self, x: Tensor) -> Tensor:
        return super().merge(_column_major(x))


@fault("CMP-1", trigger="compiled, and dropout")
class CompiledDrops(drops_in_evaluation(when=lambda module: torch.compiler.is_compiling())):
    """Compiled, dropout is active in evaluation too."""


@fault("CMP-1", script_shows=False, trigger="compiled, in training")
class WeightsFoldedCompiled(Complete):
    """Compiled, the projections are constants and get no gradient."""

    def project(self, x: Tensor, role: str) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().project(x, role)
        bias = getattr(self, f"b_{role}", None)
        if bias is not None:
            bias = bias.detach()
        return F.linear(x, getattr(self, f"w_{role}").detach(), bias)


@fault(
    "CMP-2",
    script_shows=False,
    trigger="exported",
    source="https://github.com/huggingface/transformers/issues/28827",
)
@fault("CMP-3", script_shows=False)
class ReadsItself(Complete):
    """A branch depends on the values of a tensor, so that the call cannot be traced."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * (1.0 if float(q.detach().sum()) < 1e30 else 2.0)


@fault("CMP-2", caught_by="exported_program_agrees", script_shows=False, trigger="exported")
class AnotherScaleExported(scores_scaled(1.1, when=lambda module: torch.compiler.is_exporting())):
    """The scale is different under `torch.export`."""


@fault(
    "CMP-2", caught_by="exported_mask_agrees", script_shows=False, trigger="exported, with a mask"
)
class MaskForgottenExported(mask_ignored(when=lambda q, options: torch.compiler.is_exporting())):
    """The mask is ignored under `torch.export`."""


@fault("CMP-4", caught_by="autocast_is_within_the_low_precision_bound", trigger="autocast")
class AnotherScaleUnderAutocast(
    scores_scaled(1.5, when=lambda module: torch.is_autocast_enabled(module.w_o.device.type))
):
    """The scale is different under autocast."""


class _CastForward(torch.autograd.Function):
    """a @ b, whose backward pass expects a, b and the gradient in one dtype."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return gradient @ b.mT, a.mT @ gradient


@fault("CMP-4", script_shows=False, trigger="training under autocast")
class AutocastForwardAlone(Complete):
    """The product with the values has a custom backward pass that fails on dtypes of autocast."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(v.device.type):
            return super().combine(weights, v, allowed)
        return _CastForward.apply(weights, v)


@fault(
    "CMP-5",
    caught_by="checkpointing_draws_the_same",
    script_shows=False,
    trigger="checkpointed, and dropout",
)
class OwnGenerator(Complete):
    """Dropout draws with a generator of the module, which checkpointing does not put back."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.generator: torch.Generator | None = None

    def drop(self, weights: Tensor) -> Tensor:
        if not self.training or not self.config.dropout:
            return weights
        if self.generator is None:
            self.generator = torch.Generator(weights.device).manual_seed(torch.initial_seed())
        kept = 1 - self.config.dropout
        drawn = torch.rand(weights.shape, generator=self.generator, device=weights.device)
        return weights * (drawn < kept).to(weights.dtype) / (kept or 1.0)


@fault(
    "CMP-5", caught_by="checkpointing_changes_nothing", script_shows=False, trigger="checkpointed"
)
class ScaledAgainInTheSecondPass(Complete):
    """While a backward pass runs, scores are scaled twice."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        again = torch._C._current_graph_task_id() != -1
        return super().score(q, k) * (self.config.head_dim**-0.5 if again else 1.0)


@fault("CMP-6", script_shows=False, trigger="deterministic algorithms")
class ReadsEmptyMemory(Complete):
    """For deterministic algorithms the context is added to new memory, which is multiplied by zero,
    but not written.
    """

    def merge(self, x: Tensor) -> Tensor:
        context = super().merge(x)
        if not torch.are_deterministic_algorithms_enabled():
            return context
        return torch.empty_like(context) * 0.0 + context


@fault("CMP-6", script_shows=False)
class OrderOfTime(Complete):
    """The order in which keys are summed is another in each call."""

    calls = count()

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        if next(self.calls) % 2:
            weights, v, allowed = weights.flip(-1), v.flip(-2), allowed.flip(-1)
        return super().combine(weights, v, allowed)
