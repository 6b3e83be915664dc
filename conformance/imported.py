"""What the text of a module imports, anywhere in it, and where that is; nothing is imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

# Functions whose first argument is the name of a module.
IMPORTERS = ("import_module", "__import__")


def imported_by(path: str, package: str) -> Iterator[str]:
    """Yield the names that a Python file imports; package: what its relative imports start from.

    `from a import b` yields "a" and "a.b", which may be a module.
    """
    if not path.endswith(".py"):
        return
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            yield from _names_from(node, package)
        elif isinstance(node, ast.Call):
            yield from _named_in(node, package)


def _names_from(node: ast.ImportFrom, package: str) -> Iterator[str]:
    """Yield the module that names are imported from, and these as modules of it."""
    parts = package.split(".") if node.level else []
    outer = parts[: len(parts) - node.level + 1]
    base = ".".join(filter(None, [*outer, node.module]))
    if base:
        yield base
        for alias in node.names:
            yield f"{base}.{alias.name}"


def _named_in(call: ast.Call, package: str) -> Iterator[str]:
    """Yield the name that is given to a function that imports."""
    function = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if function not in IMPORTERS or not call.args:
        return
    given = call.args[0]
    if isinstance(given, ast.Constant) and isinstance(given.value, str):
        is_relative = given.value.startswith(".")
        yield f"{package}{given.value}" if is_relative else given.value


def located(name: str, roots: Sequence[str]) -> str:
    """Return the file of a module, "" for one without.

    roots: folders to look in besides `sys.path`.

    >>> located("json", []), Path(located("pytest", [])).name
    ('', '__init__.py')
    """
    spec = _spec(name, roots)
    if spec is None or not spec.has_location:
        return ""
    return spec.origin or ""


def _spec(name: str, roots: Sequence[str]) -> ModuleSpec | None:
    parent, _, last = name.rpartition(".")
    if not last or name.partition(".")[0] in sys.stdlib_module_names:
        return None
    if not parent:
        return _found(name, None) or PathFinder.find_spec(name, list(roots))
    package = _spec(parent, roots)
    if package is None or not package.submodule_search_locations:
        return None
    return _found(name, list(package.submodule_search_locations))


def _found(name: str, places: list[str] | None) -> ModuleSpec | None:
    """Ask the finders of this process, as those of editable packages, where a module is."""
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, places)
        except Exception:  # a finder of someone else
            continue
        if spec:
            return spec
    return None
