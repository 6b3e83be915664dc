"""Faults that STA-9, STA-10, SHP-9 and CFG-7 must catch: layers, and tensors that stay behind."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha.conformance.faults.base import Complete, Correct
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
        if role == "o":
            return F.linear(x, self.out.weight, getattr(self, "b_o", None))
        return super().project(x, role)


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
    """The scale is rounded to the dtype of the construction, and stays so in a module that is
    moved.
    """

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.factor = float(torch.tensor(1 / math.sqrt(config.head_dim), dtype=weights.w_q.dtype))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * self.factor


@fault(
    "CFG-7", caught_by="a_module_is_filled_after_construction_without_memory", script_shows=False
)
class TableIsNotSaved(Correct):
    """The scale is a buffer that is not saved, so that loading does not fill it."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, bias)
        self.register_buffer(
            "factor", torch.tensor(math.sqrt(self.config.head_dim)), persistent=False
        )

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / self.factor


@fault(
    "CFG-7",
    caught_by="the_constructor_makes_parameters_of_the_dtype_and_device",
    script_shows=False,
)
class OutputLayerOfTheDefault(Correct):
    """The constructor takes a dtype and a device, which the output layer does not get."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, n_heads, bias)
        for layer in (self.q_proj, self.k_proj, self.v_proj):
            layer.to(device=device, dtype=dtype)
