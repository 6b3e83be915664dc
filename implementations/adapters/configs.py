"""The object that a constructor takes as its config."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, get_args, is_typeddict

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
    """Return the code of a config that has what a constructor reads from `AnyConfig`, which lacked
    some of it.

    sizes: the code of the values that are known, by their names.
    """
    target: Any = constructor.func if isinstance(constructor, partial) else constructor
    code = getattr(getattr(target, "__init__", target), "__code__", target)
    receiver = next(iter(getattr(code, "co_varnames", ())), "") if inspect.isclass(target) else ""
    read = [
        after.argval
        for before, after in pairwise(dis.get_instructions(code))
        if before.opname.startswith("LOAD_FAST")
        and after.opname == "LOAD_ATTR"
        and before.argval != receiver
    ]
    names = [name for name in dict.fromkeys(read) if name in vars(error.obj)]
    values = [f"{name}={sizes.get(name, '...')}" for name in (*names, error.name)]
    return f"types.SimpleNamespace({', '.join(values)})"


def config_object(
    constructor: Callable[..., Any], name: str, every: Mapping[str, Any], kept: Collection[str]
) -> Any:
    """Return an object with these values by name, or one of the constructor's own config class that
    holds those it has.

    name: of the parameter. every: the values. kept: the names that a config class decides itself,
    as where a value is None.

    Raises what the class raises for other values.
    """
    cls = _config_class(constructor, name)
    if cls is None:
        return AnyConfig(**every)
    own = {name: value for name, value in every.items() if value is not None and name not in kept}
    try:
        return _filled(cls, own)
    except (TypeError, AttributeError):  # it requires more, or lets nothing be set
        return AnyConfig(**every)


def _filled(cls: type, values: Mapping[str, Any]) -> Any:
    """Return an object of a class, with those of the values that its constructor takes, or that it
    has as a number.
    """
    accepted = inspect.signature(cls).parameters
    taken = {
        name: p
        for name, p in accepted.items()
        if p.default is p.empty or isinstance(p.default, NUMBER)
    }
    made = cls(**{name: value for name, value in values.items() if name in taken})
    for name, value in values.items():
        if name not in accepted and isinstance(getattr(made, name, ""), NUMBER):
            setattr(made, name, value)
    return made


def _config_class(constructor: Callable[..., Any], name: str) -> type | None:
    """Return the class of a config: the annotation, or the class of configs in the module whose
    name fits best.
    """
    target: Any = constructor.func if isinstance(constructor, partial) else constructor
    found = variables_of(module_named(target.__module__))
    parameter = inspect.signature(target).parameters.get(
        name
    )  # or one of a base, to which it is passed on
    annotation = parameter.annotation if parameter else inspect.Parameter.empty
    cls = _annotated(annotation, found) or _named(target.__name__, found)
    return None if is_typeddict(cls) else cls  # a TypedDict is a dictionary


def _annotated(annotation: Any, found: Mapping[str, Any]) -> type | None:
    """Return the class that an annotation names, if it is not a builtin one."""
    if isinstance(annotation, str):
        annotation = found.get(annotation.partition("|")[0].strip())
    classes = (each for each in (annotation, *get_args(annotation)) if _is_class(each))
    others = (SimpleNamespace, inspect.Parameter.empty)
    return next(
        (cls for cls in classes if cls not in others and cls.__module__ != "builtins"), None
    )


def _is_class(value: object) -> bool:
    """Return whether a variable of a module is a class; one that is imported lazily may raise when
    it is asked.
    """
    return issubclass(type(value), type)


def _named(label: str, found: Mapping[str, Any]) -> type | None:
    """Return the one class of configs whose name has the longest beginning in common with a name."""
    own = {
        name: cls
        for name, cls in found.items()
        if _is_class(cls) and re.search(r".(Config|Args)$", name)
    }
    shared = {name: _shared(name, label) for name in own}
    best = [name for name in own if shared[name] == max(shared.values())]
    return own[best[0]] if len(best) == 1 else None


def _shared(name: str, other: str) -> int:
    """Return how many characters two names have in common at their beginning."""
    return next(
        (count for count, (a, b) in enumerate(zip(name, other, strict=False)) if a != b), len(name)
    )
