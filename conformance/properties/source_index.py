"""Which property tests which clause, read from the source: `mha spec` imports no torch."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class Listed(NamedTuple):
    """What a page of the contract says about a property; level: None for that of the clause."""

    clause: str
    number: int
    level: str | None
    module: str
    name: str


@cache
def listing() -> dict[str, tuple[Listed, ...]]:
    """Return the properties of each clause that has any, in the order of their numbers.

    >>> [tested.name for tested in listing()["HED-2"]]
    ['heads_are_independent']
    """
    by_clause: dict[str, list[Listed]] = {}
    for file in Path(__file__).parent.glob("*.py"):
        for each in _listed(file):
            by_clause.setdefault(each.clause, []).append(each)
    return {clause: tuple(sorted(by_clause[clause])) for clause in sorted(by_clause)}


def _listed(file: Path) -> list[Listed]:
    """Return the properties that a module registers by the decorator `property_of`."""
    listed = []
    for function in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "property_of":
                given: dict[str | None, Any] = {word.arg: word.value for word in decorator.keywords}
                clause = ast.literal_eval(decorator.args[0])
                number = ast.literal_eval(given.get("number", ast.Constant(1)))
                level = ast.literal_eval(given.get("level", ast.Constant(None)))
                listed.append(Listed(clause, number, level, file.stem, function.name))
    return listed
