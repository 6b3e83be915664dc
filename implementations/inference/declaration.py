"""What was inferred about a class, as the code that declares it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from torch import nn

from mha.implementations.adapters.loading import ParameterPath
from mha.spec import Alibi, Lse, Packed, QkNorm, Rotary, Rounding, Scores, Sizes, Window

Record = Alibi | Lse | Packed | QkNorm | Rotary | Rounding | Scores | Sizes | Window


# The code of what has no code as its text.
NAMED: dict[Any, str] = {
    ...: "...",
    nn.Identity: "torch.nn.Identity",
    math.inf: 'float("inf")',
}
# The records that claims are made of, each with the claim that is one.
RECORDS = {
    "Lse": "lse",
    "QkNorm": "qk_norm",
    "Rotary": "rotary",
    "Packed": "packed",
    "Rounding": "rounding",
    "Scores": "scores",
    "Sizes": "sizes",
}


def code_of_declaration(
    constructor: str, options: Mapping[str, Any], claims: Mapping[str, Any], adapter: str
) -> str:
    """Return the code that declares what was inferred, ready to paste below the class.

    constructor: its code.
    options: for the adapter, `from_module` or `from_kernel`.
    claims: those that differ from `Claims()`.
    """
    arguments = _arguments_of(constructor, options, claims)
    imports = _imports(constructor, options, claims, adapter)
    lines = [f"    {argument}," for argument in arguments]
    return "\n".join([*imports, "", f"implementation = {adapter}(", *lines, ")"])


def line_of_declaration(
    constructor: str, options: Mapping[str, Any], claims: Mapping[str, Any], adapter: str
) -> str:
    """Return the code of `code_of_declaration` in one line."""
    arguments = ", ".join(_arguments_of(constructor, options, claims))
    imports = _imports(constructor, options, claims, adapter)
    return "; ".join([*imports, f"implementation = {adapter}({arguments})"])


def _arguments_of(
    constructor: str, options: Mapping[str, Any], claims: Mapping[str, Any]
) -> list[str]:
    """Return the code of the arguments of an adapter."""
    arguments = [constructor]
    for name, value in options.items():
        if (name, value) != ("mask", "keep"):  # the default
            arguments.append(f"{name}={_literal(value)}")
    if claims:
        arguments.append(f"claims=Claims({_arguments(claims)})")
    return arguments


def _imports(
    constructor: str, options: Mapping[str, Any], claims: Mapping[str, Any], adapter: str
) -> list[str]:
    """Return the code of the imports that a declaration needs."""
    imports = [f"from mha.implementations import {adapter}"]
    if constructor.startswith("partial("):
        imports.insert(0, "from functools import partial")
    if nn.Identity in options.get("neutral", {}).values():
        imports.insert(0, "import torch")
    if claims:
        imports.append(f"from mha.spec import {', '.join(['Claims', *_records_in(claims)])}")
    return imports


def _records_in(claims: Mapping[str, Any]) -> list[str]:
    """Return the names of the records that claims are made of."""
    names = [name for name, claim in RECORDS.items() if claim in claims]
    scores = claims.get("scores", Scores())
    if scores.window:
        names.append("Window")
    if scores.alibi:
        names.append("Alibi")
    return names


def declaration_advice(label: str, parameters: Mapping[str, ParameterPath]) -> str:
    """Return how to declare by hand what could not be inferred.

    parameters: those that their names tell.
    """
    paths: Mapping[str, Any] = parameters or dict.fromkeys(("w_q", "w_k", "w_v", "w_o"), ...)
    return (
        f". Declare it below the class, and judge that: implementation = from_module({label}, "
        f"parameters={_literal(paths)}, mask=...)"
    )


def _arguments(given: Mapping[str, Any]) -> str:
    """Return the code of arguments by name."""
    return ", ".join(f"{name}={_literal(value)}" for name, value in given.items())


def _record(value: Record) -> str:
    """Return the code of a record: what differs from its defaults, and what has no default."""
    arguments = []
    for each in fields(value):
        given, default = getattr(value, each.name), default_of(each)
        if default is MISSING:
            arguments.append(_literal(given))
        elif given != default:
            arguments.append(f"{each.name}={_literal(given)}")
    return f"{type(value).__name__}({', '.join(arguments)})"


def default_of(field: Field[Any]) -> Any:
    """Return the default of a field, or MISSING."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def _literal(value: Any) -> str:
    """Return the code of a value, with double quotes and sets in a fixed order."""
    if isinstance(value, set | frozenset):
        in_order = sorted(value, key=_place_in_set)
        return f"{{{', '.join(map(_literal, in_order))}}}"
    if isinstance(value, Mapping):
        pairs = (f"{_literal(key)}: {_literal(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))})"
    if isinstance(value, Record):
        return _record(value)
    if isinstance(value, str):
        return f'"{value}"'
    return NAMED.get(value) or repr(value)


def _place_in_set(value: object) -> tuple[int, str]:
    """Return the key by which the members of a set are sorted: numbers by size, words by letter."""
    return (value if type(value) is int else 0, str(value))
