"""What a plain class or function stands for, and what to name instead of any other object."""

from __future__ import annotations

from inspect import Parameter, Signature, isfunction, signature
from types import FunctionType

import torch
from torch import nn
from torch.autograd.function import FunctionMeta

from mha.implementations.adapters.called import passed_on
from mha.implementations.adapters.construction import makes_modules
from mha.implementations.adapters.constructor_names import without_partial
from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.discovery.frameworks import HOW_TO_WRAP, framework_of
from mha.implementations.inference.infer import Inference, infer
from mha.implementations.inference.kernel_forms import kernel_maker, kernel_of_width
from mha.implementations.inference.kernels import infer_kernel


def inference_of(target: str, value: object) -> Inference:
    """Return how a class or a function, or a partial of one, is understood.

    target: what names it.

    Raises ImplementationError for any other object, and for what cannot be inferred.
    """
    _, _, label = target.rpartition(":")
    made = without_partial(value)
    framework = framework_of(made)
    if framework:
        raise ImplementationError(f"{target!r} is of {framework}; {HOW_TO_WRAP[framework]}")
    is_module_class = isinstance(made, type) and issubclass(made, nn.Module)
    if not is_module_class and not isfunction(made):
        kind = "a class" if isinstance(value, type) else f"of type {type(value).__name__}"
        raise ImplementationError(
            f"{target!r} is {kind}, neither a torch.nn.Module class nor an implementation (an"
            f" object with name, claims and build); {_instead_of(value, label)}"
        )
    assert callable(value)
    if isfunction(made) and not makes_modules(value):
        return infer_kernel(value, label)
    maker = kernel_maker(value)
    if maker:
        return infer_kernel(value, label, maker)
    of_width = kernel_of_width(value)
    if of_width:
        return infer_kernel(of_width, label)
    return infer(value, label)


def _instead_of(value: object, label: str) -> str:
    """Return what to name instead of an object that cannot be judged; label: its name."""
    if isinstance(value, nn.Module):
        return f"name the class {type(value).__name__} instead, because it is built in many sizes"
    if isinstance(value, torch.jit.ScriptFunction):
        return (
            "name the function that it is compiled from instead, because a compiled one does not"
            " name its inputs"
        )
    if isinstance(getattr(value, "__self__", value), FunctionMeta):
        return "name a function that calls its apply, because that one does not name its inputs"
    cls, instance = type(value), label
    if isinstance(value, type):
        cls, instance = value, f"{label}(...)"
    called = vars(cls).get("__call__")
    if isfunction(called):
        return f"name a function that calls it: {_function_of(instance, called)}"
    return "make one with mha.implementations.from_module or from_kernel"


def _function_of(instance: str, called: FunctionType) -> str:
    """Return the code of a function that calls an object; called: its method `__call__`."""
    own = [*signature(called).parameters.values()][1:]
    unannotated = [each.replace(annotation=Parameter.empty) for each in own]
    return f"def attend{Signature(unannotated)}: return {instance}({passed_on(own)})"
