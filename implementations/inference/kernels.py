"""How a plain function of query, key and value is understood: it is adapted as a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mha.implementations.adapters.kernel import KernelImplementation, from_kernel
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.describe import Row, shared_rows
from mha.implementations.inference.projections import ParameterMap
from mha.spec import Claims

LAYOUTS = ("b h l d", "b l h d", "l b h d")
SUPPLIED: ParameterMap = {f"w_{role}": f"w_{role}" for role in "qkvo"}


@dataclass
class KernelCandidate(Candidate):
    """One way to understand a kernel; layout: as for `from_kernel`."""

    def options(self) -> dict[str, Any]:
        """Return the arguments for `from_kernel`, except the claims."""
        shape: dict[str, Any] = {"mask_shape": self.mask_shape} if self.mask_shape else {}
        shape |= {"mask_numbers": True} if self.mask_numbers else {}
        layout = {"layout": self.layout} if self.layout != LAYOUTS[0] else {}
        return {"mask": self.mask, **shape, **layout}

    def implementation(self) -> KernelImplementation:  # type: ignore[override]  # of a kernel
        """Return the implementation that this candidate declares."""
        masks = {} if self.mask else {"masks": ()}
        return from_kernel(self.constructor, **self.options(), claims=Claims(**masks | self.claims), name=self.label)

    def left_behind(self) -> list[str]:
        """Return nothing: a function has no attributes."""
        return []

    @property
    def forward_parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the kernel."""
        return inspect.signature(self.constructor).parameters


def kernel_candidates(kernel: Callable[..., Any], label: str) -> list[Candidate]:
    """Return a candidate for each layout of query, key and value."""
    return [KernelCandidate(kernel, SUPPLIED, label, layout, claims={"causal": None}) for layout in LAYOUTS]


def rows_of_kernel(candidate: Candidate) -> list[Row]:
    """Return what was found about a kernel."""
    parameters = candidate.forward_parameters
    names = ", ".join(candidate.signature.inputs or list(parameters)[:3])
    return [
        Row("kernel", "between four projections, which are supplied", "by its parameters"),
        Row("inputs", f"{names}, of shape ({', '.join(candidate.layout.split())})", "tested"),
        *shared_rows(candidate, {}),
    ]
