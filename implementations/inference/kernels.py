"""How a plain function of query, key and value is understood: it is adapted as a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mha.implementations.adapters.kernel import MERGED_LAYOUTS, KernelImplementation, from_kernel
from mha.implementations.errors import ImplementationError
from mha.implementations.inference.candidate import Candidate, without_gradients
from mha.implementations.inference.causal import find_causal
from mha.implementations.inference.describe import Row, declaration_of, shared_rows
from mha.implementations.inference.empty_rows import find_empty_row
from mha.implementations.inference.infer import Inference
from mha.implementations.inference.masks import find_mask
from mha.implementations.inference.nearest import find_formula
from mha.implementations.inference.options import find_options, find_weights
from mha.implementations.inference.projections import ParameterMap, Unclear
from mha.implementations.pristine import pristine
from mha.spec import Claims

LAYOUTS = ("b h l d", "b l h d", "l b h d", *MERGED_LAYOUTS)
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


def _candidates(kernel: Callable[..., Any], label: str) -> list[Candidate]:
    """Return a candidate for each layout of query, key and value."""
    return [KernelCandidate(kernel, SUPPLIED, label, layout, claims={"causal": None}) for layout in LAYOUTS]


def _rows(candidate: Candidate) -> list[Row]:
    """Return what was found about a kernel."""
    parameters = candidate.forward_parameters
    names = ", ".join(candidate.signature.inputs or list(parameters)[:3])
    return [
        Row("kernel", "between four projections, which are supplied", "by its parameters"),
        Row("inputs", f"{names}, of shape ({', '.join(_axes(candidate.layout))})", "tested"),
        *shared_rows(candidate, {}),
    ]


def _axes(layout: str) -> list[str]:
    return layout.replace("(b h)", "b*h").replace("(h d)", "h*d").split()


# What a kernel of packed inputs is given, and not claimed, by its required parameters.
PACKED = {
    ("qkv",): ("torch.stack((q, k, v), 2)", "masks=(), causal=None, returns_weights=False, cross_attention=False"),
    ("q", "kv"): ("q, torch.stack((k, v), 2)", "masks=(), causal=None, returns_weights=False"),
}


def _require_inputs(kernel: Callable[..., Any], label: str) -> None:
    """Raise ImplementationError for a function that cannot take query, key and value."""
    parameters = inspect.signature(kernel).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = tuple(each.name for each in parameters if each.default is each.empty and each.kind not in variadic)
    if required in PACKED:
        packed, claims = PACKED[required]
        raise ImplementationError(
            f"{label} takes {required[-1]} as one tensor; declare a function that packs it, and judge that: "
            f"implementation = from_kernel(lambda q, k, v: {label}({packed}), layout='b l h d', mask=None, "
            f"claims=Claims({claims}))"
        )
    if len(parameters) < 3 and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        raise ImplementationError(
            f"{label} takes ({', '.join(each.name for each in parameters)}); a kernel takes query, key and value of "
            "shape (b, h, l, d), and a function that makes a module takes d_model and n_heads"
        )


def _first_found(candidates: Sequence[Candidate]) -> Candidate:
    """Return the first candidate whose layout gives the formula of attention, if need be without gradients.

    Raises ImplementationError, with what to declare, for what is left open.
    """
    problem = None
    for tried in (candidates, [*map(without_gradients, candidates)]):
        try:
            return _found(tried)
        except Unclear as unclear:
            problem = problem or unclear
    label = candidates[0].label
    raise ImplementationError(
        f"{label} needs a declaration: {problem}. Declare it below the function, and judge that: "
        f"implementation = from_kernel({label}, layout=..., mask=...)"
    )


def _found(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate that is understood, with its claims; raises Unclear for what is left open."""
    candidate = next((each for each in candidates if find_formula(each)), None)
    if candidate is None:
        problem = candidates[0].problem or "its output matches no formula of attention"
        raise Unclear(
            f"called with query, key and value of shape (b, h, l, d), {problem}; a function that makes a module "
            "needs parameters d_model and n_heads"
        )
    find_mask(candidate)
    find_causal(candidate)
    find_empty_row(candidate)
    find_weights(candidate)
    find_options(candidate, {})
    return candidate


@pristine()
def infer_kernel(kernel: Callable[..., Any], label: str = "") -> Inference:
    """Infer the layout and the masks of a function of query, key and value.

    Raises ImplementationError where no layout gives the formula of attention.
    """
    label = label or str(getattr(kernel, "__name__", "kernel"))
    _require_inputs(kernel, label)
    candidate = _first_found(_candidates(kernel, label))
    declaration = declaration_of(label, candidate.options(), candidate.claims, "from_kernel")
    return Inference(candidate.implementation(), tuple(_rows(candidate)), declaration)
