"""Faults that STA-9, STA-10 and SHP-9 must catch: layers that are not called, and tensors that stay behind."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha.conformance.faults.base import Complete
from mha.conformance.faults.fault import fault
from mha.spec import Config, Weights


@fault("STA-9", script_shows=False, source="https://github.com/pytorch/pytorch/issues/78109")
class LayerIsRead(Complete):
    """The output projection is a layer, whose weight is read instead of calling it."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.out = nn.Linear(1, 1, bias=False)
        self.out.weight = self.w_o

    def project(self, x: Tensor, role: str) -> Tensor:
        return F.linear(x, self.out.weight, getattr(self, "b_o", None)) if role == "o" else super().project(x, role)


@fault("STA-10", script_shows=False)
class ParameterWithoutUse(Complete):
    """A scale that can be learned is made, and not used."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.temperature = nn.Parameter(torch.ones(()))

    def weight_gradients(self) -> dict[str, Tensor]:
        gradients = super().weight_gradients()
        del gradients["temperature"]
        return gradients


@fault("SHP-9", trigger="a module that was moved to another dtype")
class ScaleStaysBehind(Complete):
    """The scale is rounded to the dtype of the construction, and stays so in a module that is moved."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.factor = float(torch.tensor(1 / math.sqrt(config.head_dim), dtype=weights.w_q.dtype))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * self.factor
