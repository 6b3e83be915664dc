"""Building a module for trial runs, and what to do where that cannot be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from mha.implementations.adapters.configs import AnyConfig, config_code
from mha.implementations.adapters.construction import SHORT, SIZES, Room, construct, parameters_of
from mha.implementations.adapters.constructor_names import CONSTRUCTOR_NAMES
from mha.implementations.adapters.signature import forward_of, input_names
from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.discovery.raised import Raised
from mha.implementations.inference.probes import CONFIG
from mha.implementations.process.pristine import as_found

# What constructors raise for arguments that they do not take.
OF_ARGUMENTS = (ValueError, AssertionError, TypeError, LookupError)
SMALL = f"d_model={CONFIG.d_model}, n_heads={CONFIG.n_heads}"


def built(
    label: str, constructor: Callable[..., nn.Module], arguments: Mapping[str, str]
) -> nn.Module:
    """Return a module for trial runs; raises ImplementationError for what cannot be built, or
    called by names.
    """
    try:
        with as_found():
            module = construct(constructor, arguments, CONFIG, room=Room(SHORT))
    except (Exception, SystemExit) as error:
        raise ImplementationError(_cannot_be_built(label, constructor, error)) from error
    require_forward(label, module)
    _require_named_inputs(label, module)
    return module


def _cannot_be_built(
    label: str, constructor: Callable[..., nn.Module], error: BaseException
) -> str:
    """Return what a constructor raised, and what to do: an error that may be of its arguments, to
    give it others.
    """
    raised = Raised.of(error)
    if raised.needs:
        takes_device = "device" in parameters_of(constructor) and "CUDA" in raised.needs
        on_cpu = f', or judge functools.partial({label}, device="cpu")' if takes_device else ""
        return f"{label} {raised.needs}{on_cpu} ({label}({SMALL}) raised {raised})"
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
    """Raise ImplementationError for a class, or a module, that does not say how it is called."""
    forward = getattr(made, "forward", None)
    if getattr(forward, "__func__", forward) is nn.Module.forward:
        raise ImplementationError(f"{label} does not define forward")


def _require_named_inputs(label: str, made: object) -> None:
    """Raise ImplementationError for what is not a module, and for a compiled one, which does not
    name its inputs.
    """
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
    """Return how to judge a module that takes query, key and value, and may have no projections of
    its own.
    """
    has_forward = inspect.isclass(made) and hasattr(made, "forward")
    parameters = inspect.signature(forward_of(cast(type, made))).parameters if has_forward else {}
    if not input_names(parameters):
        return ""
    names = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    taken = ", ".join(
        name if parameters[name].default is inspect.Parameter.empty else f"{name}=None"
        for name in names
    )
    given = {"temperature": f"{names[0]}.shape[-1] ** 0.5"}
    required = [p.name for p in inspect.signature(made).parameters.values() if p.default is p.empty]
    built = ", ".join(
        f"{name}={given.get(name, '...')}" for name in required if name not in ("args", "kwargs")
    )
    return (
        f". If it has no projections, judge a function of heads, (b, h, l, d): def attend({taken}):"
        f" return {label}({built}).eval()({', '.join(names)})"
    )
