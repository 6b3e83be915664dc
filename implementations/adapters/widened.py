"""A class that is built with widths which no name of a parameter says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from mha.implementations.discovery.errors import UnsupportedCallError


@dataclass(frozen=True, eq=False)
class Widened:
    """Builds a class, each of whose open widths is that of all heads, or of one.

    label: the name of the class in messages.
    cls: the class.
    d_model, n_heads: its names for these.
    widths: "d_model" or "head_dim", by the name of each open width.
    parameters: the other parameters of the class, each passed by its name.
    """

    label: str
    cls: Callable[..., nn.Module]
    d_model: str
    n_heads: str
    widths: Mapping[str, str]
    parameters: Mapping[str, inspect.Parameter]

    def __call__(self, **given: Any) -> nn.Module:
        """Build the class; raises UnsupportedCallError where heads of one width do not fit."""
        width, heads = given[self.d_model], given[self.n_heads]
        if "head_dim" in self.widths.values() and heads > 0 and width % heads:
            raise UnsupportedCallError(
                f"its constructor takes the width of a head, not d_model ({width})"
            )
        values = {"d_model": width, "head_dim": width // heads if heads else width}
        return self.cls(**given, **{name: values[field] for name, field in self.widths.items()})

    @property
    def code(self) -> str:
        """The code of a function that does the same."""
        values = {"d_model": self.d_model, "head_dim": f"{self.d_model} // {self.n_heads}"}
        passed = [f"{name}={name}" for name in self.parameters]
        passed += [f"{name}={values[field]}" for name, field in self.widths.items()]
        taken = str(inspect.Signature([*self.parameters.values()]))[1:-1]
        return f"lambda {taken.removeprefix('*, ')}: {self.label}({', '.join(passed)})"
