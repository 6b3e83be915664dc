"""Faults that STA must catch, most of STA-3 and STA-4 aside: changed inputs, global state."""

from __future__ import annotations

import time
import warnings
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor

from mha.conformance.faults.base import Complete, Correct
from mha.conformance.faults.families import scores_scaled
from mha.conformance.faults.fault import fault
from mha.spec import Config, Options, Output, Weights


@fault("STA-1")
class ScalesQueryInPlace(Correct):
    """The query is scaled in place."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Output:
        return super().forward(query.mul_(1.0), key, value, mask, is_causal)


@fault("STA-1", script_shows=False)
class MaskTurnedInPlace(Complete):
    """The mask is changed in place by `.data`, which autograd's version counter does not see."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        mask = options.mask
        if mask is not None and mask.dtype == torch.bool:
            mask.data[..., -1:] = True
        return super().attend(query, key, value, options.change(mask=mask))


@fault("STA-1", script_shows=False)
class WeightsDrift(Complete):
    """Each call changes the weights a little."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        result = super().attend(query, *rest)
        self.w_o.data.mul_(1.001)
        return result


@fault("STA-2", trigger="L = S = 1")
class QueryGivenBack(Complete):
    """With one query and one key, the value itself is returned."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        result = super().attend(query, key, value, *rest)
        if query.shape[1] == key.shape[1] == 1:
            return Output(value, result.weights)
        return result


@fault(
    "STA-2", script_shows=False, trigger="weights requested without gradients, and two later calls"
)
class WeightsInTurn(Complete):
    """Weights that are returned without gradients take turns in two buffers."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights, _ = super().attend(query, *rest)
        if weights is None or torch.is_grad_enabled():
            return Output(output, weights)
        with torch.inference_mode(False):
            pair = [torch.empty_like(weights) for _ in range(2)]
        held = self.__dict__.setdefault("held", {}).setdefault((weights.shape, weights.dtype), pair)
        held.reverse()
        return Output(output, held[0].copy_(weights))


@fault("STA-2", script_shows=False, trigger="everything masked")
class BiasGivenBack(Complete):
    """If the mask excludes everything, the output is the bias parameter itself."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        mask = options.mask
        output, weights, _ = super().attend(query, key, value, options.change(mask=mask))
        if (
            mask is not None
            and mask.dtype == torch.bool
            and not mask.any()
            and self.config.has_bias("o")
        ):
            output = self.b_o.expand(output.shape)
        return Output(output, weights)


@fault("STA-5", script_shows=False, trigger="evaluation with p > 0")
class DrawsInEvaluation(Complete):
    """What to drop is drawn in evaluation too, where nothing is dropped."""

    def drop(self, weights: Tensor) -> Tensor:
        if self.config.dropout and not self.training:
            torch.rand(weights.shape)
        return super().drop(weights)


@fault("STA-5", script_shows=False)
class PrecisionLeftInConstruction(Complete):
    """The construction lets products of float32 be less precise, for the whole process."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        torch.set_float32_matmul_precision("high")


@fault("STA-5", script_shows=False)
class DefaultDtypeChanged(Complete):
    """The call changes the default dtype."""

    def drop(self, weights: Tensor) -> Tensor:
        torch.set_default_dtype(
            {torch.float32: torch.float64}.get(torch.get_default_dtype(), torch.float32)
        )
        return super().drop(weights)


@fault("STA-5", script_shows=False)
class GradientModeChanged(Complete):
    """The call toggles the gradient mode."""

    def drop(self, weights: Tensor) -> Tensor:
        torch.set_grad_enabled(not torch.is_grad_enabled())
        return super().drop(weights)


@fault("STA-5", script_shows=False)
class WarningsSilenced(Complete):
    """The call adds a warning filter that stays."""

    def drop(self, weights: Tensor) -> Tensor:
        warnings.filterwarnings("ignore", category=ResourceWarning)
        return super().drop(weights)


@fault("STA-5", script_shows=False)
class SubnormalsFlushed(Complete):
    """The first call makes the process flush subnormal numbers to zero."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        torch.set_flush_denormal(True)
        return super().attend(query, *rest)


@fault("STA-6", script_shows=False, trigger="eval after training")
class RunningMean(Complete):
    """A running mean is kept in training."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.register_buffer("mean", weights.w_q.new_zeros(()))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * k.detach().mean()
        return super().score(q, k)


@fault("STA-6", trigger="training")
class AnotherScaleInTraining(scores_scaled(1.01, when=lambda module: module.training)):
    """The scale is different in training."""


@fault(
    "STA-7",
    script_shows=False,
    trigger="two threads",
    source="https://github.com/NVIDIA/TensorRT-LLM/pull/14858",
)
class Scratch(Complete):
    """The scores are kept in an attribute, which another thread may overwrite."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        self.scores = super().score(q, k)
        time.sleep(1e-4)
        return self.scores


@fault("STA-5", script_shows=False)
class NumpyDraws(Complete):
    """A random number is drawn from NumPy's global generator."""

    def attend(self, *inputs: Any) -> Output:
        numpy.random.rand()
        return super().attend(*inputs)


@fault(
    "STA-3",
    caught_by="tensors_may_change_between_calls",
    script_shows=False,
    trigger="a second call",
)
class ResultsByAddress(Complete):
    """An earlier result is returned for a query at the same address."""

    kept: ClassVar[dict[Any, Any]] = {}

    def key_of(self, query: Tensor) -> int:
        return query.data_ptr()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        asked = type(self), self.key_of(query), query.shape, key.shape, options.need_weights
        result = self.kept.get(asked)
        if result is None or result.output.dtype != query.dtype:
            result = self.kept[asked] = super().attend(query, key, value, options)
        return result


@fault(
    "STA-3",
    caught_by="tensors_may_change_between_calls",
    script_shows=False,
    trigger="a second call",
)
class ResultsByIdentity(ResultsByAddress):
    """An earlier result is returned for a query with the same `id`."""

    def key_of(self, query: Tensor) -> int:
        return id(query)
