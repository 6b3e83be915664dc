"""A class that is built with widths which no name of a parameter says, or with a single head."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
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
        return self.cls(**self.passed(given))

    def passed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the class for those that this is given."""
        width, heads = given[self.d_model], given[self.n_heads]
        values = {"d_model": width, "head_dim": width // heads if heads else width}
        return {**given, **{name: values[field] for name, field in self.widths.items()}}

    @property
    def code(self) -> str:
        """The code of a function that does the same."""
        values = {"d_model": self.d_model, "head_dim": f"{self.d_model} // {self.n_heads}"}
        passed = [f"{name}={name}" for name in self.parameters]
        passed += [f"{name}={values[field]}" for name, field in self.widths.items()]
        return self._lambda(passed)

    def _lambda(self, passed: Sequence[str]) -> str:
        """Return the code of a function that calls the class; passed: the code of arguments."""
        taken = str(inspect.Signature([*self.parameters.values()]))[1:-1]
        return f"lambda {taken.removeprefix('*, ')}: {self.label}({', '.join(passed)})"


class OneHead(Widened):
    """Builds a class that takes no number of heads, and has one."""

    @classmethod
    def of(
        cls, label: str, target: Callable[..., nn.Module], parameters: Mapping[str, Any]
    ) -> OneHead:
        """Return the builder of a class; label: its name; parameters: those that it takes."""
        taken = {}
        for name, parameter in parameters.items():
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                taken[name] = parameter.replace(
                    annotation=parameter.empty, kind=parameter.KEYWORD_ONLY
                )
        heads = inspect.Parameter("n_heads", inspect.Parameter.KEYWORD_ONLY)
        return cls(label, target, "", heads.name, {}, {heads.name: heads, **taken})

    def __call__(self, **given: Any) -> nn.Module:
        """Build the class; raises UnsupportedCallError for another number of heads than one."""
        if given[self.n_heads] != 1:
            raise UnsupportedCallError(
                f"its constructor takes no number of heads ({given[self.n_heads]}): it has one"
            )
        return self.cls(**self.passed(given))

    def passed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the class for those that this is given."""
        return {name: value for name, value in given.items() if name != self.n_heads}

    @property
    def code(self) -> str:
        """The code of a function that does the same."""
        return self._lambda([f"{name}={name}" for name in self.parameters if name != self.n_heads])
