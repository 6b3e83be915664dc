"""Objects of the author's own code in a script: where they are imported from, how they are made."""

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

from mha.conformance.scripts.literals import by_name, literal, literal_of
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
    """The author's objects that a script uses: how they are imported, and what names stand for.

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
        """Return the name of a class or a function, which is imported from now on."""
        for known, each in self.values.items():
            if each is value:
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
        """Note how an attribute of a module gets a name; without a module, its file is run."""
        path = Path(file)
        if not module:
            self.modules |= {"runpy", "sys"}
            self.folders[from_here(path.parent)] = None
            self.imported.append(f"{name} = runpy.run_path({from_here(path)!r})[{attribute!r}]")
            return
        root = _root(module, path) if file else None
        if root is not None:
            self.modules.add("sys")
            self.folders[from_here(root)] = None
        line = f"from {module} import {attribute}"
        if attribute != name:
            line += f" as {name}"
        self.imported.append(line)

    def lines(self) -> list[str]:
        """Return the lines that import everything, after those of the modules of Python."""
        return [*map(path_line, self.folders), *self.imported]

    def _place(self, value: Any) -> tuple[str, str, str] | None:
        """Return the module, the attribute and the file of a value; None if they are not known."""
        names = dict.fromkeys([str(getattr(value, "__module__", "")), *sys.modules])
        for name in names:
            module = module_named(name)
            held_as = _attribute(module, value)
            if held_as and name not in MAINS:
                file = _without_this_package(module)
                can_be_imported = all(map(str.isidentifier, name.split(".")))
                return name if can_be_imported else "", held_as, file
        file, _, held_as = self.target.rpartition(":")
        if not file.endswith(".py"):
            return None
        if Path(file).is_file() and IMPORTS_THIS.search(Path(file).read_text()):
            raise InexpressibleError(f"{Path(file).name} imports it")
        return "", held_as, str(Path(file).resolve())


def from_here(path: Path) -> str:
    """Return a path from the current folder if it is below, since reports are shown to others."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def path_line(folder: str) -> str:
    """Return the line of a script after which modules in a folder can be imported."""
    line = f"sys.path.insert(0, {folder!r})"
    return line if Path(folder).is_absolute() else f"{line}  # run it where it was judged"


def _attribute(module: object, value: Any) -> str:
    """Return the name of a value in a module, its own one if it has that; empty if it has none."""
    own = str(getattr(value, "__name__", ""))
    held = variables_of(module)
    if own and held.get(own) is value:
        return own
    for name, each in held.items():
        if each is value:
            return name
    return ""


def _without_this_package(module: object) -> str:
    """Return the file of a module, if any; raises InexpressibleError if it imports this package."""
    file, name = file_of(module), str(attribute(module, "__name__", ""))
    if name.partition(".")[0] == "mha":
        raise InexpressibleError("it is about a class or a function of that package")
    if file.endswith(".py") and IMPORTS_THIS.search(Path(file).read_text(errors="replace")):
        raise InexpressibleError(f"{Path(file).name} imports it")
    return file


def _root(module: str, path: Path) -> Path | None:
    """Return the folder that a module is imported from; None where it is installed."""
    path = path.resolve()
    parts = module.split(".")
    inside = path.parent if path.name == "__init__.py" else path.with_suffix("")
    if [*inside.parts[-len(parts) :]] != parts:
        return None
    root = inside.parents[len(parts) - 1]
    for key in ("stdlib", "purelib", "platlib"):
        if Path(sysconfig.get_path(key)).resolve() in (root, *root.parents):
            return None
    return root


def value_code(value: Any, imports: Imports) -> str:
    """Return an expression for an argument; raises InexpressibleError for an unknown kind."""
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
        return dict_code({key: value_code(item, imports) for key, item in value.items()})
    items = [value_code(item, imports) for item in value]
    if isinstance(value, list):
        return f"[{', '.join(items)}]"
    # A comma after each item, also after a single one.
    return f"({', '.join(items)},)" if items else "()"


def dict_code(codes: Mapping[Any, str]) -> str:
    """Return the expression for a dictionary."""
    items = [f"{key!r}: {code}" for key, code in codes.items()]
    return f"{{{', '.join(items)}}}"


def named_code(given: Mapping[str, Any], imports: Imports) -> str:
    """Return arguments by name."""
    return by_name({name: value_code(value, imports) for name, value in given.items()})


def made_code(constructor: Any, given: Mapping[str, str], imports: Imports) -> str:
    """Return the call of what makes a module; given: the code of each argument.

    A `functools.partial` that no module has is written out.
    """
    if isinstance(constructor, partial) and not _is_held(constructor):
        if constructor.args:
            raise InexpressibleError("its functools.partial sets arguments by position")
        kept: dict[str, str] = {}
        for name, value in constructor.keywords.items():
            if name not in given:
                kept[name] = value_code(value, imports)
        return made_code(constructor.func, {**kept, **given}, imports)
    return f"{imports.name_of(constructor)}({by_name(given)})"


def _is_held(value: Any) -> bool:
    return any(module not in MAINS for module, _, _ in names_of(value))


def config_lines(value: Any, name: str, imports: Imports) -> tuple[str, list[str]]:
    """Return the expression for an object of the author's own config class, and lines before it.

    Its attributes that the constructor does not take are set in these lines, under a name.
    """
    cls = type(value)
    given: dict[str, Any] = {}
    for key, parameter in inspect.signature(cls).parameters.items():
        if hasattr(value, key) and not is_default(getattr(value, key), parameter.default):
            given[key] = getattr(value, key)
    others: dict[str, Any] = {}
    if held := getattr(value, "__dict__", {}):
        made = vars(cls(**given))
        for key, x in held.items():
            if not is_default(x, made.get(key, MISSING)):
                others[key] = x
    code = f"{imports.name_of(cls)}({named_code(given, imports)})"
    if not others:
        return code, []
    set_later = [f"{name}.{key} = {value_code(x, imports)}" for key, x in others.items()]
    return name, [f"{name} = {code}", *set_later]


def is_default(value: Any, default: Any) -> bool:
    """Return whether a value is the default, of the same type."""
    return type(value) is type(default) and isinstance(value, NUMBERS) and value == default
