"""What may be a kernel: a function of query, key and value, or a module without weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial, wraps
from typing import Any, cast

from torch import nn

from mha.implementations.adapters.construction import makes_modules
from mha.implementations.adapters.constructor_names import CONSTRUCTOR_NAMES, VARIADIC
from mha.implementations.adapters.kernel_axes import function_of
from mha.implementations.adapters.names import NEUTRAL_MEANING, words_of
from mha.implementations.adapters.of_width import (
    NO_DROPOUT,
    ROOT,
    SCALE,
    WIDTH,
    OfWidth,
)
from mha.implementations.adapters.packing import packing_names
from mha.implementations.adapters.signature import input_names, required_inputs
from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.declared import Declared, DeclaredKernel
from mha.implementations.inference.probes import CONFIG, Inputs
from mha.implementations.inference.roles import role_of
from mha.implementations.process.pristine import as_found
from mha.spec.option_names import SCALE_NAMES

# How many inputs are one tensor, by the required parameters of a kernel.
PACKED_INPUTS: dict[tuple[str, ...], str] = {("qkv",): "3"}
for _query in ("q", "query", "x"):
    PACKED_INPUTS |= {(_query, "kv"): "2", (_query, "key_value"): "2"}

# What a constructor is given by the names of what it requires. The width of values is another one.
OF_WIDTH = dict.fromkeys(CONSTRUCTOR_NAMES["head_dim"], WIDTH)
OF_WIDTH |= {"temperature": ROOT} | dict.fromkeys(SCALE_NAMES, SCALE)
for _name in ("d_v", "dv"):
    del OF_WIDTH[_name]


def kernel_maker(constructor: Callable[..., Any]) -> Callable[[], nn.Module] | None:
    """Return what makes a module of heads that needs no sizes and has no weights, without dropout.

    None for any other class.
    """
    parameters = inspect.signature(constructor).parameters
    dropout = {name: 0.0 for name in CONSTRUCTOR_NAMES["dropout"] if name in parameters}
    required = set[str]()
    for each in parameters.values():
        if each.default is each.empty and each.kind not in VARIADIC:
            required.add(each.name)
    if makes_modules(constructor) or not required <= dropout.keys():
        return None
    with suppress(Exception, SystemExit), as_found():
        module = constructor(**dropout)
        names = input_names(inspect.signature(function_of(module)).parameters)
        takes_heads = names or required_names(module) in PACKED_INPUTS
        if takes_heads and not [*module.parameters()]:
            return partial(constructor, **dropout)
    return None


def kernel_of_width(constructor: Callable[..., Any]) -> OfWidth | None:
    """Return a function for a module of heads whose constructor requires the width of a head.

    None for any other class.
    """
    if not inspect.isclass(constructor) or makes_modules(constructor):
        return None
    given = _given_for_width(constructor)
    if {*given.values()} <= {NO_DROPOUT}:
        return None
    kernel = OfWidth(cast("type[nn.Module]", constructor), given)
    with suppress(Exception, SystemExit), as_found():
        module = kernel.made(CONFIG.head_dim)
        if input_names(kernel.__signature__.parameters) and not [*module.parameters()]:
            return kernel
    return None


def _given_for_width(constructor: Callable[..., Any]) -> dict[str, str]:
    """Return what a constructor is given by the width of a head; nothing if it requires more.

    A temperature is the root of the width, which divides the scores.
    """
    given = dict[str, str]()
    for name, parameter in inspect.signature(constructor).parameters.items():
        is_required = parameter.default is parameter.empty and parameter.kind not in VARIADIC
        if name in CONSTRUCTOR_NAMES["dropout"]:
            given[name] = NO_DROPOUT
        elif is_required and name in OF_WIDTH:
            given[name] = OF_WIDTH[name]
        elif is_required:
            return {}
    return given


def results_of(candidate: Candidate, inputs: Inputs, **options: Any) -> list[Any]:
    """Return what a kernel itself returns in a trial run, each time that its adapter calls it."""
    results = []

    kernel = candidate.declared.constructor

    @wraps(function_of(kernel))
    def attend(*given: Any, **named: Any) -> Any:
        results.append(kernel(*given, **named))
        return results[-1]

    candidate.declaring(constructor=attend).call_plainly(inputs, **options)
    return results


def code_of(made: Callable[..., nn.Module], label: str) -> str:
    """Return the code that makes a kernel."""
    given = ", ".join(f"{name}={value}" for name, value in getattr(made, "keywords", {}).items())
    return f"{label}({given})"


def code_of_constructor(declared: Declared) -> str:
    """Return the code of what is judged, by its label: a class, or a kernel that may be made."""
    if isinstance(declared, DeclaredKernel) and declared.made:
        return code_of(declared.made, declared.label)
    if isinstance(declared.constructor, OfWidth):
        return declared.constructor.code(declared.label)
    return declared.label


def required_names(kernel: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the inputs that a kernel requires."""
    required = required_inputs(inspect.signature(function_of(kernel)).parameters)
    return tuple(each.name for each in required if each.name not in NEUTRAL_MEANING)


def takes_tokens(kernel: Callable[..., Any]) -> bool:
    """Return whether a kernel requires offsets in a row of tokens, beside query, key and value."""
    parameters = inspect.signature(function_of(kernel)).parameters
    if not input_names(parameters):
        return False
    for meaning, name in packing_names(parameters).items():
        is_required = parameters[name].default is inspect.Parameter.empty
        if meaning.startswith("offsets") and is_required:
            return True
    return False


def require_inputs(kernel: Callable[..., Any], label: str) -> None:
    """Raise ImplementationError for a function that cannot take query, key and value only."""
    required = required_names(kernel)
    if required in PACKED_INPUTS or takes_tokens(kernel):
        return
    _require_nothing_else(label, required)
    parameters = inspect.signature(function_of(kernel)).parameters.values()
    if len(parameters) < 3 and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        names = ", ".join(each.name for each in parameters)
        raise ImplementationError(
            f"{label} takes ({names}); a kernel takes query,"
            " key and value of shape (b, h, l, d), and a function that makes a module takes"
            " d_model and n_heads"
        )


def _require_nothing_else(label: str, required: Collection[str]) -> None:
    """Raise ImplementationError for a function of weights, or of where packed sequences begin."""
    offsets = [name for name in required if name.startswith("cu_seqlens")]
    if offsets:
        raise ImplementationError(
            f"{label} takes sequences packed one after another ({', '.join(offsets)}); judge a"
            f" function of a batch, (b, l, h, d), that packs its items, calls {label}, and unpacks"
            " the result"
        )
    weights = [name for name in required if _is_weight(name)]
    if len(weights) > 2:
        raise ImplementationError(
            f"{label} takes its weights as arguments ({', '.join(weights)}); judge a"
            " torch.nn.Module that has them as parameters, and whose forward calls it"
        )


def _is_weight(name: str) -> bool:
    """Return whether a name is that of a weight, such as w_q."""
    return role_of(name) is not None and any(word[0] == "w" for word in words_of(name))
