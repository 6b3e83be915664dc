"""Attention that keeps what it should not, or changes what is not its own; see `gallery`."""

from __future__ import annotations

import time
import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor

from mha.conformance.faults.complete import Complete
from mha.spec import Config, Output, Weights


class QueryScaledInPlace(Complete):
    def attend(self, query: Tensor, *rest: Any) -> Output:
        return super().attend(query.mul_(1.0), *rest)


class MaskTurnedInPlace(Complete):
    """Turned and turned back, behind the back of autograd's counter."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any) -> Output:
        if mask is not None and mask.dtype == torch.bool:
            mask.data[..., -1:] = True
        return super().attend(query, key, value, mask, *rest)


class WeightsDrift(Complete):
    """Each call changes the weights a little."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        result = super().attend(query, *rest)
        self.w_o.data.mul_(1.001)
        return result


class QueryGivenBack(Complete):
    """A shortcut for one query and one key."""

    only = "L = S = 1"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        result = super().attend(query, key, value, *rest)
        return Output(value, result.weights) if query.shape[1] == key.shape[1] == 1 else result


class BufferUsedAgain(Complete):
    """The output lies in a buffer that the next call writes over."""

    only = "a second call"

    buffer: Tensor | None = None

    def attend(self, query: Tensor, *rest: Any) -> Output:
        output, weights = super().attend(query, *rest)
        if self.buffer is None or self.buffer.shape != output.shape or self.buffer.dtype != output.dtype:
            self.buffer = torch.empty_like(output).detach()
        return Output(self.buffer.copy_(output.detach()), weights)


class ResultsByShape(Complete):
    """Two calls of one shape are one call."""

    only = "a second call"

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.kept: dict[Any, Tensor] = {}

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return self.kept.setdefault(scores.shape, super().weigh(scores, allowed))


class _Remembers(Complete):
    """Remembers results of all attentions by what `key_of` makes of the inputs."""

    kept: ClassVar[dict[Any, Any]] = {}

    def key_of(self, x: Tensor) -> int:
        raise NotImplementedError

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        asked = type(self), self.key_of(query), query.shape, key.shape, rest[-1]
        result = self.kept.get(asked)
        if result is None or result.output.dtype != query.dtype:
            result = self.kept[asked] = super().attend(query, key, value, *rest)
        return result


class ResultsByIdentity(_Remembers):
    """A result is given again for a tensor with the same `id`."""

    only = "a second call"

    def key_of(self, x: Tensor) -> int:
        return id(x)


class ResultsByAddress(_Remembers):
    """A result is given again for a tensor at the same address."""

    only = "a second call"

    def key_of(self, x: Tensor) -> int:
        return x.data_ptr()


class Tires(Complete):
    """The first five calls of an attention are right."""

    only = "a sixth call"

    calls = 0

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        self.calls += 1
        return super().score(q, k) * (1.0 if self.calls <= 5 else 1.1)


class TiresOfAll(Complete):
    """The first twenty calls of a process are right."""

    only = "the twenty-first call of a process"

    calls: ClassVar[list[int]] = []

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        self.calls.append(1)
        return super().score(q, k) * (1.0 if len(self.calls) <= 20 else 1.1)


class SpoiltByRefusal(Complete):
    """A call that is refused leaves a trace."""

    only = "the first call after a failure"

    spoilt = 0.0

    def attend(self, query: Tensor, *rest: Any) -> Output:
        before, self.spoilt = self.spoilt, 1.0
        output, weights = super().attend(query, *rest)
        self.spoilt = before
        return Output(output + self.spoilt, weights)


class WeightsCopied(Complete):
    """A copy of the weights is made at construction, and is in no state_dict."""

    only = "a call after the weights changed"

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.copies = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    def project(self, x: Tensor, role: str) -> Tensor:
        return torch.nn.functional.linear(x, self.copies[f"w_{role}"], self.copies.get(f"b_{role}"))


class CopyForgets(Complete):
    """A deep copy loses a sign."""

    only = "a deep copy"

    sign = 1.0

    def __deepcopy__(self, memo: dict[int, Any]) -> CopyForgets:
        again = CopyForgets(self.config, Weights(**dict(self.named_parameters())))
        again.sign = -1.0
        return again

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * self.sign


class DrawsWithoutDropout(Complete):
    """A random number is drawn without dropout."""

    def drop(self, weights: Tensor) -> Tensor:
        torch.rand(1)
        return super().drop(weights)


class DefaultDtypeChanged(Complete):
    """The call changes the default dtype."""

    def drop(self, weights: Tensor) -> Tensor:
        torch.set_default_dtype({torch.float32: torch.float64}.get(torch.get_default_dtype(), torch.float32))
        return super().drop(weights)


class GradientModeChanged(Complete):
    """The call switches gradients off for good."""

    def drop(self, weights: Tensor) -> Tensor:
        torch.set_grad_enabled(not torch.is_grad_enabled())
        return super().drop(weights)


class WarningsSilenced(Complete):
    """The call silences warnings for good."""

    def drop(self, weights: Tensor) -> Tensor:
        warnings.filterwarnings("ignore", category=ResourceWarning)
        return super().drop(weights)


class RunningMean(Complete):
    """Keeps a statistic in training, and uses it in evaluation."""

    only = "eval after training"

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.register_buffer("mean", torch.zeros((), dtype=weights.w_q.dtype))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * k.detach().mean()
        return super().score(q, k)


class AnotherScaleInTraining(Complete):
    """Another scale in training mode."""

    only = "training"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * (1.01 if self.training else 1.0)


class Scratch(Complete):
    """What a call works on is an attribute, which another thread may set meanwhile."""

    only = "two threads"
    source = "https://github.com/NVIDIA/TensorRT-LLM/pull/14858"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        self.scores = super().score(q, k)
        time.sleep(1e-4)
        return self.scores
