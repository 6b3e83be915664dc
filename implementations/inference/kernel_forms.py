"""What may be a kernel: a function of query, key and value, or a class of a module of heads without
weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn

from mha.implementations.adapters.construction import makes_modules
from mha.implementations.adapters.constructor_names import CONSTRUCTOR_NAMES, VARIADIC
from mha.implementations.adapters.kernel import function_of
from mha.implementations.adapters.names import NEUTRAL_MEANING, words_of
from mha.implementations.adapters.signature import input_names, required_inputs
from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.projections import role_of
from mha.implementations.process.pristine import as_found

# How many inputs are one tensor, by the required parameters of a kernel.
PACKED_INPUTS: dict[tuple[str, ...], str] = {
    (query, both): "2" for query in ("q", "query", "x") for both in ("kv", "key_value")
}
PACKED_INPUTS |= {("qkv",): "3"}


def kernel_maker(constructor: Callable[..., Any]) -> Callable[[], nn.Module] | None:
    """Return what makes a module of heads that needs no sizes and has no weights, without dropout.

    None for any other class.
    """
    parameters = inspect.signature(constructor).parameters
    dropout = dict.fromkeys(
        (name for name in CONSTRUCTOR_NAMES["dropout"] if name in parameters), 0.0
    )
    required = [
        p.name for p in parameters.values() if p.default is p.empty and p.kind not in VARIADIC
    ]
    if makes_modules(constructor) or not {*required} <= {*dropout}:
        return None
    with suppress(Exception, SystemExit), as_found():
        module = constructor(**dropout)
        takes_heads = (
            input_names(inspect.signature(module.forward).parameters)
            or required_names(module) in PACKED_INPUTS
        )
        if takes_heads and not [*module.parameters()]:
            return partial(constructor, **dropout)
    return None


def results_of(candidate: Candidate, inputs: tuple[Tensor, ...], **options: Any) -> list[Any]:
    """Return what a kernel itself returns in a trial run, each time that its adapter calls it."""
    results = []

    @wraps(function_of(candidate.constructor))
    def attend(*given: Any, **named: Any) -> Any:
        results.append(candidate.constructor(*given, **named))
        return results[-1]

    replace(candidate, constructor=attend).call_plainly(inputs, **options)
    return results


def code_of(made: Callable[..., nn.Module], label: str) -> str:
    """Return the code that makes a kernel."""
    given = ", ".join(f"{name}={value}" for name, value in getattr(made, "keywords", {}).items())
    return f"{label}({given})"


def required_names(kernel: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the inputs that a kernel requires."""
    names = (
        each.name for each in required_inputs(inspect.signature(function_of(kernel)).parameters)
    )
    return tuple(name for name in names if name not in NEUTRAL_MEANING)


def require_inputs(kernel: Callable[..., Any], label: str) -> None:
    """Raise ImplementationError for a function that cannot take query, key and value, or needs more
    than them.
    """
    required = required_names(kernel)
    if required in PACKED_INPUTS:
        return
    _require_nothing_else(label, required)
    parameters = inspect.signature(function_of(kernel)).parameters.values()
    if len(parameters) < 3 and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        raise ImplementationError(
            f"{label} takes ({', '.join(each.name for each in parameters)}); a kernel takes query,"
            " key and value of shape (b, h, l, d), and a function that makes a module takes"
            " d_model and n_heads"
        )


def _require_nothing_else(label: str, required: Collection[str]) -> None:
    """Raise ImplementationError for a function that requires weights, or where packed sequences
    begin.
    """
    if offsets := [name for name in required if name.startswith("cu_seqlens")]:
        raise ImplementationError(
            f"{label} takes sequences packed one after another ({', '.join(offsets)}); judge a"
            f" function of a batch, (b, l, h, d), that packs its items, calls {label}, and unpacks"
            " the result"
        )
    weights = [
        name
        for name in required
        if role_of(name) and any(word[0] == "w" for word in words_of(name))
    ]
    if len(weights) > 2:
        raise ImplementationError(
            f"{label} takes its weights as arguments ({', '.join(weights)}); judge a"
            " torch.nn.Module that has them as parameters, and whose forward calls it"
        )
