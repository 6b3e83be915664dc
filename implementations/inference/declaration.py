"""What was inferred about a class, as the code that declares it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from mha.implementations.adapters.loading import ParameterPath
from mha.spec import Alibi, Lse, Rounding, Scores, Sizes, Window


def declaration_of(
    label: str, options: Mapping[str, Any], claims: Mapping[str, Any], adapter: str = "from_module"
) -> str:
    """Return the code that declares what was inferred, ready to paste below the class.

    options: for the adapter, `from_module` or `from_kernel`. claims: those that differ from
    `Claims()`.
    """
    lines = [
        f"    {name}={_literal(value)},"
        for name, value in options.items()
        if (name, value) != ("mask", "keep")
    ]
    imports = [f"from mha.implementations import {adapter}"]
    imports = (
        ["from functools import partial", *imports] if label.startswith("partial(") else imports
    )
    if claims:
        arguments = ", ".join(f"{name}={_literal(value)}" for name, value in claims.items())
        lines.append(f"    claims=Claims({arguments}),")
        known = (("Lse", "lse"), ("Rounding", "rounding"), ("Scores", "scores"), ("Sizes", "sizes"))
        parts = [name for name, claim in known if claim in claims]
        scores = claims.get("scores", Scores())
        parts += [
            name for name, part in (("Window", scores.window), ("Alibi", scores.alibi)) if part
        ]
        imports.append(f"from mha.spec import {', '.join(['Claims', *parts])}")
    return "\n".join([*imports, "", f"implementation = {adapter}(\n    {label},", *lines, ")"])


def declaration_advice(label: str, parameters: Mapping[str, ParameterPath]) -> str:
    """Return how to declare by hand what could not be inferred; parameters: those that their names
    tell.
    """
    paths: Mapping[str, Any] = parameters or dict.fromkeys(("w_q", "w_k", "w_v", "w_o"), ...)
    return (
        f". Declare it below the class, and judge that: implementation = from_module({label}, "
        f"parameters={_literal(paths)}, mask=...)"
    )


def _record(value: Alibi | Lse | Rounding | Scores | Sizes | Window) -> str:
    """Return the code of a record: the fields that differ from their defaults, and those that have
    none.
    """
    given = {field.name: getattr(value, field.name) for field in fields(value)}
    defaults = {field.name: _default(field) for field in fields(value)}
    changed = {name: each for name, each in given.items() if each != defaults[name]}
    arguments = (
        _literal(each) if defaults[name] is MISSING else f"{name}={_literal(each)}"
        for name, each in changed.items()
    )
    return f"{type(value).__name__}({', '.join(arguments)})"


def _default(field: Field[Any]) -> Any:
    """Return the default of a field, or MISSING."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def _literal(value: Any) -> str:
    """Return the code of a value, with double quotes and sets in a fixed order."""
    if isinstance(value, set | frozenset):
        numbers_in_order = sorted(
            value, key=lambda each: (each if type(each) is int else 0, str(each))
        )
        return f"{{{', '.join(map(_literal, numbers_in_order))}}}"
    if isinstance(value, Mapping):
        return (
            f"{{{', '.join(f'{_literal(key)}: {_literal(each)}' for key, each in value.items())}}}"
        )
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))})" if value else "()"
    if isinstance(value, Alibi | Lse | Rounding | Scores | Sizes | Window):
        return _record(value)
    if isinstance(value, str):
        return f'"{value}"'
    return "..." if value is ... else repr(value)
