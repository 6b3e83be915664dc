"""One way to understand a module class, to be tried."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mha.implementations.adapters.calling import ARGUMENT_WORDS
from mha.implementations.adapters.module import ModuleImplementation, from_module
from mha.implementations.inference.probes import CONFIG, Formula
from mha.implementations.inference.projections import Map
from mha.spec import Claims, Config, Output, Weights


@dataclass
class Reading:
    """One way to understand a class, or a `functools.partial` of one; the claims grow as more of it is tried."""

    constructor: Callable[..., nn.Module]
    map: Map
    label: str
    layout: str = "b l d"
    formula: Formula = field(default_factory=Formula)
    mask: Any = None
    mask_shape: str | None = None
    mask_numbers: bool = False
    claims: dict[str, Any] = field(default_factory=dict)
    explained: bool = False
    problem: str = ""
    weights_shape: tuple[int, ...] | None = None

    def options(self) -> dict[str, Any]:
        """What `from_module` is given, but for the claims."""
        shape: dict[str, Any] = {"mask_shape": self.mask_shape} if self.mask_shape else {}
        shape |= {"mask_numbers": True} if self.mask_numbers else {}
        layout = {"layout": self.layout} if self.layout != "b l d" else {}
        return {"parameters": self.map, "mask": self.mask, **shape, **layout}

    def implementation(self) -> ModuleImplementation:
        """Build the adapter."""
        masks = {} if self.mask else {"masks": ()}
        return from_module(self.constructor, **self.options(), claims=Claims(**masks | self.claims), name=self.label)

    @property
    def alone(self) -> bool:
        """Whether it is self-attention."""
        return "cross_attention" in self.claims

    @property
    def config(self) -> Config:
        """What it is tried with."""
        return replace(CONFIG, bias=max(self.claims.get("bias", {True})))

    @property
    def weights(self) -> Weights:
        """What is loaded into it."""
        return Weights.random(self.config, 0)

    def call(self, inputs: tuple[Tensor, ...], **named: Any) -> Output | None:
        """Call the module, in evaluation; None if it raises, and `problem` says what."""
        with torch.no_grad():
            try:
                attention = self.implementation().build(self.config, self.weights, dtype=torch.float64, device="cpu")
                return attention.eval()(*inputs, **named)  # type: ignore[no-any-return]  # of nn.Module
            except (Exception, SystemExit) as error:  # of the class, which may do anything
                self.problem = f"{type(error).__name__}: {error}".splitlines()[0]
                return None

    @property
    def taken(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of `forward`."""
        cls: Any = self.constructor.func if isinstance(self.constructor, partial) else self.constructor
        return inspect.signature(cls.forward).parameters


def word_of(role: str, taken: Mapping[str, inspect.Parameter]) -> str | None:
    return next((word for word in ARGUMENT_WORDS[role] if word in taken), None)
