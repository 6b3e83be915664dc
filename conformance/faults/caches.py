"""Attention that keeps weights, masks or values of earlier calls; see `gallery`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mha.conformance.faults.complete import Complete
from mha.spec import Config, Output, Weights


class MaskByAddress(Complete):
    """A mask at the address of one seen before is taken for that one."""

    only = "a second call, with another mask at the address"

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.seen: dict[Any, Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any) -> Output:
        if mask is not None:
            mask = self.seen.setdefault((mask.data_ptr(), mask.shape, mask.dtype), mask.clone())
        return super().attend(query, key, value, mask, *rest)


class LastValues(torch.autograd.Function):
    """weights @ v, whose gradient looks at the values of the last call."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, v: Tensor, module: LastCallDifferentiated) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.module = module
        return weights @ v

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient @ ctx.module.last.mT, ctx.saved_tensors[0].mT @ gradient, None


class LastCallDifferentiated(Complete):
    """The backward pass looks at the values of the last call."""

    only = "another call before the backward pass"

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        self.last = v.detach().masked_fill(~allowed.any(2).unsqueeze(-1), 0.0)
        return LastValues.apply(weights, v.masked_fill(~allowed.any(2).unsqueeze(-1), 0.0), self)


class WeightsPacked(Complete):
    """The output's weights are packed at the first call without gradients, and never again."""

    only = "a call after the weights changed"

    packed: Tensor | None = None

    def project(self, x: Tensor, role: str) -> Tensor:
        if role != "o" or torch.is_grad_enabled():
            return super().project(x, role)
        if self.packed is None:
            self.packed = self.w_o.detach().clone()
        return torch.nn.functional.linear(x, self.packed, getattr(self, "b_o", None))


class GraphKept(Complete):
    """The output's weights are prepared at the first call, together with their history."""

    only = "a second step of training"

    prepared: Tensor | None = None

    def project(self, x: Tensor, role: str) -> Tensor:
        if role != "o" or not torch.is_grad_enabled():
            return super().project(x, role)
        if self.prepared is None:
            self.prepared = self.w_o * 1.0
        return torch.nn.functional.linear(x, self.prepared, getattr(self, "b_o", None))


class BiasGivenBack(Complete):
    """Where nothing at all is allowed, the output is the bias itself."""

    only = "nothing allowed at all"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any) -> Output:
        output, weights = super().attend(query, key, value, mask, *rest)
        if mask is not None and mask.dtype == torch.bool and not mask.any() and self.config.bias:
            output = self.b_o.expand(output.shape)
        return Output(output, weights)


class CastKept(Complete):
    """The output's weights are cast at the first call under autocast, and never again."""

    only = "a call under autocast after other weights were loaded"

    cast: Tensor | None = None

    def project(self, x: Tensor, role: str) -> Tensor:
        if role != "o" or not torch.is_autocast_enabled("cpu") or torch.is_grad_enabled():
            return super().project(x, role)
        if self.cast is None:
            self.cast = self.w_o.to(torch.get_autocast_dtype("cpu"))
        return torch.nn.functional.linear(x, self.cast, getattr(self, "b_o", None))


class GroupsIndexedInInference(Complete):
    """The index that repeats the heads is made in the first call, be it in inference mode."""

    only = "training with grouped heads after a call in inference mode"

    index: Tensor | None = None

    def repeat(self, x: Tensor) -> Tensor:
        if self.config.kv_heads == self.config.n_heads:
            return x
        if self.index is None:
            self.index = torch.arange(self.config.n_heads) // (self.config.n_heads // self.config.kv_heads)
        return x[:, self.index]
