"""The function that a call of a module or a kernel is of, and its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

from torch import nn

from mha.implementations.adapters.names import NEUTRAL_MEANING


def call_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function; a pair that it takes apart into cosines and sines has no
    default.

    >>> def forward(x, position_embeddings=None):
    ...     cos, sin = position_embeddings
    >>> call_parameters(forward)["position_embeddings"]
    <Parameter "position_embeddings: tuple">

    Raises ValueError for a function whose signature cannot be read.
    """
    parameters = dict(inspect.signature(function).parameters)
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not {"cos", "sin"} <= {*code.co_varnames, *code.co_cellvars}:
        return parameters
    for name, parameter in parameters.items():
        if NEUTRAL_MEANING.get(name) == "rotation":
            parameters[name] = parameter.replace(default=parameter.empty, annotation=tuple)
    return parameters


def passed_on(parameters: Iterable[inspect.Parameter]) -> str:
    """Return the code of arguments by which a function passes on its own ones.

    >>> def attend(q, *others, scale=None, **options): ...
    >>> passed_on(inspect.signature(attend).parameters.values())
    'q, *others, scale=scale, **options'
    """
    forms: dict[object, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*{0}",
        inspect.Parameter.KEYWORD_ONLY: "{0}={0}",
        inspect.Parameter.VAR_KEYWORD: "**{0}",
    }
    return ", ".join(forms.get(each.kind, "{0}").format(each.name) for each in parameters)


def forward_of(cls: type) -> Callable[..., Any]:
    """Return `forward` of a class, with the parameters that a call passes: without the receiver.

    >>> class Attention:
    ...     def forward(this, x): ...
    >>> list(call_parameters(forward_of(Attention)))
    ['x']
    """
    name = "__call__" if is_called_without_forward(cls) else "forward"
    found: Any = getattr(cls, name)
    is_bound = getattr(found, "__self__", None) is not None
    own = inspect.getattr_static(cls, name, found)
    # What has no `__get__` is called without a receiver.
    if is_bound or isinstance(own, staticmethod) or not hasattr(type(own), "__get__"):
        return found  # type: ignore[no-any-return]  # a function
    return MethodType(found, object())


def is_called_without_forward(cls: type) -> bool:
    """Return whether a class of modules defines `__call__` in the place of `forward`."""
    has_forward = getattr(cls, "forward", None) is not nn.Module.forward
    return not has_forward and cls.__call__ is not nn.Module.__call__
