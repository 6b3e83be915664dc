"""Building a module for trial runs, and what to do where that cannot be."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mha.implementations.adapters.called import (
    call_parameters,
    forward_of,
    is_called_without_forward,
)
from mha.implementations.adapters.configs import AnyConfig, config_code
from mha.implementations.adapters.construction import (
    SHORT,
    SIZES,
    Room,
    construct,
    parameters_of,
)
from mha.implementations.adapters.constructor_names import CONSTRUCTOR_NAMES, without_partial
from mha.implementations.adapters.names import NEUTRAL_MEANING
from mha.implementations.adapters.signature import input_names
from mha.implementations.adapters.widened import OneHead
from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.discovery.raised import Raised
from mha.implementations.inference.probes import CONFIG
from mha.implementations.process.pristine import as_found
from mha.spec import Config

# What constructors raise for arguments that they do not take.
OF_ARGUMENTS = (ValueError, AssertionError, TypeError, LookupError)
SMALL = f"d_model={CONFIG.d_model}, n_heads={CONFIG.n_heads}"


def trial_config(constructor: Callable[..., nn.Module]) -> Config:
    """Return the configuration of trial runs, which has one head for a class with one."""
    if isinstance(without_partial(constructor), OneHead):
        return replace(CONFIG, n_heads=1)
    return CONFIG


def built(
    label: str, constructor: Callable[..., nn.Module], arguments: Mapping[str, str]
) -> nn.Module:
    """Return a module for trial runs.

    Raises ImplementationError for what cannot be built, or called by names.
    """
    try:
        with as_found():
            config = trial_config(constructor)
            module = construct(constructor, arguments, config, room=Room(SHORT))
    except (Exception, SystemExit) as error:
        message = _cannot_be_built(label, constructor, error)
        flag = _flag_that_builds(constructor, arguments, str(error))
        if flag:
            message = f"{message}; or judge functools.partial({label}, {flag})"
        raise ImplementationError(message) from error
    require_forward(label, module)
    _require_named_inputs(label, module)
    return module


def _flag_that_builds(
    constructor: Callable[..., nn.Module], arguments: Mapping[str, str], message: str
) -> str:
    """Return a flag of a constructor with another value than its default, with which it builds.

    message: of the error, which names the flag. Returns "" where there is none.
    """
    words = {*re.findall(r"\w+", message)}
    for name, parameter in parameters_of(constructor).items():
        if name not in words or not isinstance(parameter.default, bool):
            continue
        other = partial(constructor, **{name: not parameter.default})
        with suppress(Exception), as_found():
            construct(other, arguments, CONFIG, room=Room(SHORT))
            return f"{name}={not parameter.default}"
    return ""


def _cannot_be_built(
    label: str, constructor: Callable[..., nn.Module], error: BaseException
) -> str:
    """Return what a constructor raised, and what to do; one of its arguments may want others."""
    raised = Raised.of(error)
    if raised.needs:
        needs, parameters = raised.needs, inspect.signature(constructor).parameters
        if "CUDA" in needs and "device" in parameters:
            needs = f'{needs}, or judge functools.partial({label}, device="cpu")'
        return f"{label} {needs} ({label}({SMALL}) raised {raised})"
    message, given = str(raised), "..."
    if isinstance(error, AttributeError) and isinstance(error.obj, AnyConfig):
        sizes = {name: code for field, code in SIZES.items() for name in CONSTRUCTOR_NAMES[field]}
        message, given = (
            f"AttributeError: its config has no {error.name}",
            config_code(constructor, sizes, error),
        )
    elif raised.place and not isinstance(error, OF_ARGUMENTS):
        return f"{label}({SMALL}) raised {message}"
    hint = (
        f"name a function that builds it: def attention(d_model, n_heads): return {label}({given})"
    )
    return f"{label}({SMALL}) raised {message}; {hint}"


def require_forward(label: str, made: object) -> None:
    """Raise ImplementationError for a class, or a module, that does not say how it is called.

    Where `__call__` takes all positions of a batch as one axis, and its size beside them, the
    message has a class that is called in the usual way.
    """
    forward = getattr(made, "forward", None)
    if getattr(forward, "__func__", forward) is not nn.Module.forward:
        return
    cls = made if isinstance(made, type) else type(made)
    if not is_called_without_forward(cls):
        raise ImplementationError(f"{label} does not define forward")
    parameters = call_parameters(forward_of(cls))
    if not any(NEUTRAL_MEANING.get(name) == "batch" for name in parameters):
        return
    first, *rest = parameters
    taken, passed = [first], [f"{first}.flatten(0, 1)"]
    for name in rest:
        if NEUTRAL_MEANING.get(name) == "batch":
            passed.append(f"{name}=len({first})")
        else:
            taken.append(f"{name}=None")
            passed.append(f"{name}={name}")
    raise ImplementationError(
        f"{label} takes the positions of all items as one axis; judge a class that is called in the"
        f' usual way: import torch; Batched = type("Batched", ({label},), {{"__call__":'
        f' torch.nn.Module.__call__, "forward": lambda self, {", ".join(taken)}:'
        f" {label}.__call__(self, {', '.join(passed)}).view_as({first})}})"
    )


def _require_named_inputs(label: str, made: object) -> None:
    """Raise ImplementationError for what is no module, or does not name its inputs."""
    if not isinstance(made, nn.Module):
        raise ImplementationError(
            f"{label}({SMALL}) returned {made!r:.80}, which is not a torch.nn.Module"
        )
    if isinstance(made, torch.jit.ScriptModule) or hasattr(made, "_orig_mod"):
        raise ImplementationError(
            f"{label} returns a compiled module, which does not name its inputs; name what returns"
            " it uncompiled"
        )


def kernel_advice(label: str, made: Callable[..., Any]) -> str:
    """Return how to judge a module of query, key and value that may have no projections."""
    if not (inspect.isclass(made) and hasattr(made, "forward")):
        return ""
    parameters = inspect.signature(forward_of(made)).parameters
    if not input_names(parameters):
        return ""
    names, taken = [], []
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            names.append(name)
            taken.append(name if parameter.default is parameter.empty else f"{name}=None")
    given = {"temperature": f"{names[0]}.shape[-1] ** 0.5"}
    built = []
    for name, parameter in inspect.signature(made).parameters.items():
        if parameter.default is parameter.empty and name not in ("args", "kwargs"):
            built.append(f"{name}={given.get(name, '...')}")
    return (
        ". If it has no projections, judge a function of heads, (b, h, l, d):"
        f" def attend({', '.join(taken)}):"
        f" return {label}({', '.join(built)}).eval()({', '.join(names)})"
    )
