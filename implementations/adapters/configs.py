"""The object that a constructor takes as its config."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any, get_args, is_typeddict

from mha.implementations.adapters.constructor_names import without_partial
from mha.implementations.adapters.widened import OneHead
from mha.implementations.discovery.loaded import module_named, variables_of

# What classes after those of transformers read from their config without a parameter of this name.
OTHERS = {
    "is_decoder": False,
    "_attn_implementation": "eager",
    "layer_norm_eps": 1e-5,
    "position_embedding_type": "absolute",
    "use_cache": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    # Of decoders: nothing but the formula, and a rotation of the whole head.
    "rotary_dim": None,
    "rotary_pct": 1.0,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "attn_logit_softcapping": None,
}

# Of what holds a number, or will.
NUMBER = (int, float, type(None))


class AnyConfig(SimpleNamespace):
    """A config whose values are attributes, and items as in a dictionary."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**OTHERS | values)

    def __getitem__(self, name: str) -> Any:
        """Return a value; raises KeyError without one."""
        return vars(self)[name]

    def __contains__(self, name: str) -> bool:
        """Return whether it has a value."""
        return name in vars(self)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or the default."""
        return vars(self).get(name, default)


def config_code(
    constructor: Callable[..., Any], sizes: Mapping[str, str], error: AttributeError
) -> str:
    """Return the code of a config with all that a constructor reads.

    Where its source cannot be had, "..." stands for what else it reads beside what was missing.

    sizes: the code of the values that are known, by their names.
    error: what the constructor raised for an `AnyConfig`, which lacked some of it.
    """
    function = without_partial(constructor)
    if inspect.isclass(function):
        function = function.__init__
    read = attributes_read(function)
    if read is None:
        return f"types.SimpleNamespace({error.name}=..., ...)"
    known = [name for name in read if name in vars(error.obj)]
    values = [f"{name}={sizes.get(name, '...')}" for name in (*known, str(error.name))]
    return f"types.SimpleNamespace({', '.join(values)})"


def attributes_read(function: Callable[..., Any]) -> list[str] | None:
    """Return the attributes that a function reads from its variables, in the order of its source.

    Those of `self`, the first parameter of a method, are left out. None without a source.
    """
    try:
        source = textwrap.dedent(inspect.getsource(function))
        (definition,) = ast.parse(source).body
    except (OSError, TypeError, ValueError, SyntaxError):  # as of a builtin, or of part of a line
        return None
    if not isinstance(definition, ast.FunctionDef):
        return None
    variables = _variables_of(definition)
    read = []
    for node in ast.walk(definition):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        if isinstance(node.value, ast.Name) and node.value.id in variables:
            read.append(node)
    read.sort(key=lambda node: (node.lineno, node.col_offset))
    return list(dict.fromkeys(node.attr for node in read))


def _variables_of(definition: ast.FunctionDef) -> set[str]:
    """Return the parameters and the variables of a function, without `self`."""
    variables: set[str] = set()
    for node in ast.walk(definition):
        if isinstance(node, ast.arg):
            variables.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            variables.add(node.id)
    if definition.name == "__init__":
        variables.discard(definition.args.args[0].arg)
    return variables


def config_object(
    constructor: Callable[..., Any],
    name: str,
    every: Mapping[str, Any],
    kept: Collection[str],
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return an object with values by name, of the constructor's own config class if it has one.

    An object of that class holds those of the values that it has.

    name: of the parameter.
    every: the values.
    kept: the names that a config class decides itself, as where a value is None.
    options: what it holds beside them.

    Raises what the class raises for other values.
    """
    cls = config_class(constructor, name)
    options = options or {}
    if cls is None:
        return AnyConfig(**{**every, **options})
    own = {name: value for name, value in every.items() if value is not None and name not in kept}
    try:
        return filled(cls, own, options)
    except (TypeError, AttributeError):  # it requires more, or lets nothing be set
        return AnyConfig(**{**every, **options})


def filled(cls: type, values: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Return an object of a class with those of the values that it takes, or has as a number.

    options: what it holds in any case, in the place of values of the same names.
    """
    accepted = inspect.signature(cls).parameters
    taken = {name: value for name, value in options.items() if name in accepted}
    for name, value in values.items():
        if name in accepted and name not in taken and _may_be_number(accepted[name]):
            taken[name] = value
    made = cls(**taken)
    for name, value in {**values, **options}.items():
        if name not in accepted and (name in options or _is_own_number(made, name)):
            setattr(made, name, value)
    return made


def _is_own_number(made: Any, name: str) -> bool:
    """Return whether an object has a number of a name that it does not make of other ones."""
    if not isinstance(getattr(made, name, ""), NUMBER):
        return False
    of_others = set[str]()
    if is_dataclass(made):
        of_others.update(field.name for field in fields(made) if not field.init)
    return name not in of_others


def _may_be_number(parameter: inspect.Parameter) -> bool:
    default = parameter.default
    return default is inspect.Parameter.empty or isinstance(default, NUMBER)


def config_class(constructor: Callable[..., Any], name: str) -> type | None:
    """Return the class of a config: the annotation, or one of the module with a fitting name."""
    target = without_partial(constructor)
    if isinstance(target, OneHead):
        target = without_partial(target.cls)
    found = variables_of(module_named(target.__module__))
    # A parameter of a base, to which it is passed on, is not looked at.
    parameter = inspect.signature(target).parameters.get(name)
    cls = None
    if parameter is not None:
        if parameter.annotation in (Any, "Any"):
            return None
        cls = _annotated(parameter.annotation, found)
    if cls is None:
        cls = _named(target.__name__, found)
    return None if is_typeddict(cls) else cls  # a TypedDict is a dictionary


def _annotated(annotation: Any, found: Mapping[str, Any]) -> type | None:
    """Return the class that an annotation names, if it is not a builtin one."""
    if isinstance(annotation, str):
        annotation = found.get(annotation.partition("|")[0].strip())
    for cls in (annotation, *get_args(annotation)):
        if not _is_class(cls) or cls in (SimpleNamespace, inspect.Parameter.empty):
            continue
        if cls.__module__ != "builtins":
            return cls  # type: ignore[no-any-return]  # a class
    return None


def _is_class(value: object) -> bool:
    """Return whether a variable of a module is a class, without asking it: it may raise."""
    return issubclass(type(value), type)


def _named(label: str, found: Mapping[str, Any]) -> type | None:
    """Return the one class of configs whose name has the longest beginning in common with another.

    label: that other name.
    """
    best: list[type] = []
    longest = 0
    for name, value in found.items():
        if not _is_class(value) or not re.search(r".(Config|Args)$", name):
            continue
        shared = _shared(name, label)
        if shared > longest:
            best, longest = [], shared
        if shared == longest:
            best.append(value)
    return best[0] if len(best) == 1 else None


def _shared(name: str, other: str) -> int:
    """Return how many characters two names have in common at their beginning."""
    count = 0
    for own, others in zip(name, other, strict=False):
        if own != others:
            break
        count += 1
    return count
