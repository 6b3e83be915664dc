"""Objects of the author's own code in a script: where they are imported from, and how they are
made.
"""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mha.conformance.scripts.literals import literal, literal_of
from mha.implementations.discovery.loaded import (
    MAINS,
    attribute,
    file_of,
    module_named,
    names_of,
    variables_of,
)
from mha.implementations.discovery.resolve import split_name

# A line that imports this package.
IMPORTS_THIS = re.compile(r"^[ \t]*(?:from|import)[ \t]+mha\b", re.MULTILINE)
NUMBERS = (bool, int, float, str, type(None), torch.dtype)
MISSING = object()


class InexpressibleError(Exception):
    """A script cannot show this without this package; the message says why."""


class Imports:
    """The author's objects that a script uses: how they are imported, and what they are, by their
    names.

    target: how the implementation was named, which says where an object is that no loaded module
    has.
    """

    def __init__(self, target: str = "") -> None:
        self.target = split_name(target)[1]
        self.modules: set[str] = set()
        self.folders: dict[str, None] = {}
        self.imported: list[str] = []
        self.values: dict[str, Any] = {}

    def name_of(self, value: Any) -> str:
        """Return the name of a class or a function, writing the lines that import it where it has
        none yet.
        """
        known = next((name for name, each in self.values.items() if each is value), "")
        if known:
            return known
        place = self._place(value)
        name = place[1] if place else str(getattr(value, "__name__", "attention"))
        if not name.isidentifier() or name in self.values:
            name = f"attention_of_{len(self.values)}"
        self.values[name] = value
        if place:
            self._import(*place, name)
        else:
            self.imported.append(f"{name} = ...  # put here what was judged")
        return name

    def _import(self, module: str, attribute: str, file: str, name: str) -> None:
        """Note how an attribute of a module gets a name; without a module, it is run from its file."""
        path = Path(file)
        if not module:
            self.modules |= {"runpy", "sys"}
            self.folders[str(path.parent)] = None
            self.imported.append(f"{name} = runpy.run_path({file!r})[{attribute!r}]")
            return
        if root := _root(module, path) if file else None:
            self.modules.add("sys")
            self.folders[str(root)] = None
        renamed = "" if attribute == name else f" as {name}"
        self.imported.append(f"from {module} import {attribute}{renamed}")

    def lines(self) -> list[str]:
        """Return the lines that import everything, after those of the modules of Python."""
        return [*(f"sys.path.insert(0, {folder!r})" for folder in self.folders), *self.imported]

    def _place(self, value: Any) -> tuple[str, str, str] | None:
        """Return the module, the attribute and the file of a value; None if they are not known."""
        names = dict.fromkeys([str(getattr(value, "__module__", "")), *sys.modules])
        for name in names:
            module = module_named(name)
            held_as = _attribute(module, value)
            if held_as and name not in MAINS:
                file, is_name = (
                    _without_this_package(module),
                    all(map(str.isidentifier, name.split("."))),
                )
                return name if is_name else "", held_as, file
        file, _, held_as = self.target.rpartition(":")
        if not file.endswith(".py"):
            return None
        text = Path(file).read_text() if Path(file).is_file() else ""
        if IMPORTS_THIS.search(text):
            raise InexpressibleError(f"{Path(file).name} imports it")
        return "", held_as, str(Path(file).resolve())


def _attribute(module: object, value: Any) -> str:
    """Return the name of a value in a module, its own one first; empty if the module does not have
    it.
    """
    own = str(getattr(value, "__name__", ""))
    held = variables_of(module)
    if own and held.get(own) is value:
        return own
    return next((name for name, each in held.items() if each is value), "")


def _without_this_package(module: object) -> str:
    """Return the file of a module, if it has one; raises InexpressibleError where it imports this
    package.
    """
    file, name = file_of(module), str(attribute(module, "__name__", ""))
    if name.partition(".")[0] == "mha":
        raise InexpressibleError("it is about a class or a function of that package")
    if file.endswith(".py") and IMPORTS_THIS.search(Path(file).read_text(errors="replace")):
        raise InexpressibleError(f"{Path(file).name} imports it")
    return file


def _root(module: str, path: Path) -> Path | None:
    """Return the folder from which a module is imported; None where every Python of the environment
    finds it.
    """
    path = path.resolve()
    parts = module.split(".")
    inside = path.parent if path.name == "__init__.py" else path.with_suffix("")
    if [*inside.parts[-len(parts) :]] != parts:
        return None
    root = inside.parents[len(parts) - 1]
    everywhere = {
        Path(sysconfig.get_path(key)).resolve() for key in ("stdlib", "purelib", "platlib")
    }
    return None if everywhere & {root, *root.parents} else root


def value_code(value: Any, imports: Imports) -> str:
    """Return an expression for an argument; raises InexpressibleError for an object of an unknown
    kind.
    """
    if isinstance(value, Tensor):
        return literal(value)
    if isinstance(value, NUMBERS):
        return literal_of(value)
    if type(value) in (tuple, list, dict):
        return _container_code(value, imports)
    if type(value) is SimpleNamespace:
        return f"types.SimpleNamespace({named_code(vars(value), imports)})"
    if type(value) is nn.Linear:
        bias = "" if value.bias is not None else ", bias=False"
        return f"torch.nn.Linear({value.in_features}, {value.out_features}{bias})"
    raise InexpressibleError(f"an argument is of type {type(value).__name__}")


def _container_code(value: Any, imports: Imports) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {value_code(item, imports)}' for key, item in value.items())}}}"
    items = [value_code(item, imports) for item in value]
    return (
        f"[{', '.join(items)}]"
        if isinstance(value, list)
        else f"({''.join(f'{item}, ' for item in items).rstrip()})"
    )


def named_code(given: Mapping[str, Any], imports: Imports) -> str:
    """Return arguments by name."""
    return ", ".join(f"{name}={value_code(value, imports)}" for name, value in given.items())


def made_code(constructor: Any, given: Mapping[str, str], imports: Imports) -> str:
    """Return the call of a class or a function that makes a module; given: the code of each
    argument.

    A `functools.partial` that no module has is written out.
    """
    if isinstance(constructor, partial) and not _is_held(constructor):
        if constructor.args:
            raise InexpressibleError("its functools.partial sets arguments by position")
        kept = {name: value for name, value in constructor.keywords.items() if name not in given}
        written = {name: value_code(value, imports) for name, value in kept.items()}
        return made_code(constructor.func, {**written, **given}, imports)
    arguments = ", ".join(f"{name}={code}" for name, code in given.items())
    return f"{imports.name_of(constructor)}({arguments})"


def _is_held(value: Any) -> bool:
    return any(module not in MAINS for module, _, _ in names_of(value))


def config_lines(value: Any, name: str, imports: Imports) -> tuple[str, list[str]]:
    """Return the expression for an object of the author's own config class, and the lines that must
    stand before it.

    Its attributes that the constructor does not take are set afterwards, under a name.
    """
    cls = type(value)
    parameters = inspect.signature(cls).parameters
    given = {
        key: getattr(value, key)
        for key, parameter in parameters.items()
        if hasattr(value, key) and not is_default(getattr(value, key), parameter.default)
    }
    held = vars(value) if hasattr(value, "__dict__") else {}
    before = vars(cls(**given)) if held else {}
    others = {key: x for key, x in held.items() if not is_default(x, before.get(key, MISSING))}
    made = f"{imports.name_of(cls)}({named_code(given, imports)})"
    if not others:
        return made, []
    return name, [
        f"{name} = {made}",
        *(f"{name}.{key} = {value_code(x, imports)}" for key, x in others.items()),
    ]


def is_default(value: Any, default: Any) -> bool:
    """Return whether a value is the default, of the same type."""
    return type(value) is type(default) and isinstance(value, NUMBERS) and value == default
