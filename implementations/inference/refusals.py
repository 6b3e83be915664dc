"""What is said about a class that could not be understood, and what to do."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from mha.implementations.adapters.construction import building_advice, read_from_module
from mha.implementations.adapters.names import NEUTRAL_MEANING
from mha.implementations.errors import ImplementationError
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.declaration import declaration_advice
from mha.implementations.inference.projections import Unclear, parameter_maps


def refusal(
    empty: Candidate, module: nn.Module, arguments: Mapping[str, str], problem: Unclear | None
) -> ImplementationError:
    """Return why a module is not read, and what to do; problem: what is left open."""
    label = empty.label
    if offsets := ", ".join(name for name in empty.signature.others if name.startswith("cu_seqlens")):
        return ImplementationError(
            f"{label} takes sequences packed one after another ({offsets}); judge a module of a batch, (b, l, d), that "
            f"packs its items, calls {label}, and unpacks the result"
        )
    if variables := ", ".join(read_from_module(empty.constructor)):
        advice = building_advice(label, empty.constructor, arguments)
        return ImplementationError(f"{label} reads {variables} from its module: {problem}; {advice}")
    advice = f"{_unknown_inputs(empty)}{_advice(empty, module)}"
    return ImplementationError(f"{label} needs a declaration: {problem}{advice}")


def _unknown_inputs(empty: Candidate) -> str:
    """Return a remark on what `forward` requires that has no known name."""
    unknown = [name for name in empty.signature.others if name not in NEUTRAL_MEANING]
    advice = "of no known meaning, and was given None; pass call=... that gives something else"
    return f"; forward also requires {', '.join(unknown)}, {advice}" if unknown else ""


def _advice(empty: Candidate, module: nn.Module) -> str:
    try:
        return declaration_advice(empty.label, parameter_maps(module, empty.config)[0])
    except Unclear:
        return declaration_advice(empty.label, {})
