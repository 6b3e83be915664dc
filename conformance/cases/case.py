"""A case: everything that determines one example, in a line that runs as code."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch

from mha.conformance.cases.layouts import MIXED, lay_out
from mha.conformance.cases.masks import make_mask
from mha.conformance.cases.values import make_inputs
from mha.spec import Config, Problem
from mha.spec.claims import Alignment

# Which of the tensors made for query, key and value each of the three really is.
SHARING = {
    "cross": (0, 1, 2),
    "self": (0, 0, 0),
    "memory": (0, 1, 1),
    "query_key": (0, 0, 2),
    "query_value": (0, 1, 0),
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Case:
    """One example. Its repr leaves out what has its default, and gives the same tensors when it is run again.

    n_heads, head_dim, bias: the configuration. B, L, S: batch, queries, keys. dtype, device: names, as in torch.
    mask: a kind of `mha.conformance.cases.masks`. causal: the causal flag of the call.
    inputs: "cross" (three tensors), "self" (one tensor given three times), "memory" (key and value are one tensor),
        "query_key" (query and key are), or "query_value" (query and value are).
    layout: a layout of `mha.conformance.cases.layouts`, or "mixed". regime: one of `mha.conformance.cases.values`.
    path: "eval", "train", "no_grad", "inference" or "train_no_grad": the modes of module and gradients in the call.
    need_weights: whether the weights are asked for. seed: of the numbers.
    """

    n_heads: int = 1
    head_dim: int = 1
    bias: bool = True
    B: int = 1
    L: int = 1
    S: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    mask: str = "none"
    causal: bool = False
    alignment: Alignment = "top_left"
    inputs: str = "cross"
    layout: str = "contiguous"
    values: str = "normal"
    mode: str = "eval"
    need_weights: bool = False
    seed: int = 0

    def __repr__(self) -> str:
        given = ((field, getattr(self, field.name)) for field in fields(self))
        shown = (f"{f.name}={value!r}" for f, value in given if f.default is MISSING or value != f.default)
        return f"Case({', '.join(shown)})"

    @property
    def config(self) -> Config:
        """The configuration of the attention."""
        return Config(d_model=self.n_heads * self.head_dim, n_heads=self.n_heads, bias=self.bias)

    @property
    def generator(self) -> torch.Generator:
        """A fresh source of the case's random numbers, the same each time."""
        return torch.Generator().manual_seed(self.seed)

    def problem(self, **changes: Any) -> Problem:
        """Make the tensors: rounded to the dtype first, so that implementation and oracle see the same numbers."""
        generator = self.generator
        dtype: torch.dtype = getattr(torch, self.dtype)
        weights, *made = make_inputs(self.values, self.config, (self.B, self.L, self.S), generator, dtype)
        layouts = MIXED if self.layout == "mixed" else (self.layout,) * 3
        laid_out = [lay_out(layout, x.to(self.device, dtype)) for layout, x in zip(layouts, made, strict=True)]
        query, key, value = (laid_out[place] for place in SHARING[self.inputs])
        scores = (self.B, self.n_heads, self.L, self.S)
        mask = make_mask(self.mask, scores, self.alignment if self.causal else None, generator)
        if mask is not None:
            if mask.is_floating_point():
                # What is far below every score must be a number still.
                mask = torch.where(mask.isinf(), mask, mask.clamp(min=torch.finfo(dtype).min / 8)).to(dtype)
            mask = mask.to(self.device)
        problem = Problem(self.config, weights.to(dtype, self.device), query, key, value, mask, self.causal)
        return problem.change(**changes) if changes else problem
