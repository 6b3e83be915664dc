"""Predicates of waivers: an expression over the fields of a case, such as `L == 0 and mask in ('padding', 'bool')`."""

from __future__ import annotations

import ast
from dataclasses import fields

from mha.conformance.cases.case import Case

NAMES = {field.name for field in fields(Case)}
ALLOWED = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, ast.Name, ast.Load),
    *(ast.Constant, ast.Tuple, ast.List, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
    *(ast.BinOp, ast.Mult, ast.Add, ast.Sub, ast.Mod),
)


def validate(text: str) -> None:
    """Raise ValueError for what is no comparison of fields of a case and constants."""
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(
            f"{text[:80]!r} is no expression: {error.args[0] if error.args else 'it is too long'}"
        ) from None
    if not all(isinstance(node, ALLOWED) for node in nodes):
        raise ValueError(f"{text!r} may only compare fields of a case and constants, as \"L == 0 and mask != 'none'\"")
    unknown = sorted({node.id for node in nodes if isinstance(node, ast.Name)} - NAMES)
    if unknown:
        raise ValueError(f"{text!r}: a case has no {', '.join(unknown)}; it has {', '.join(sorted(NAMES))}")


def holds(text: str, case: Case) -> bool:
    """Whether a valid predicate holds of a case; one that compares what cannot be compared does not."""
    values = {name: getattr(case, name) for name in NAMES}
    try:
        return bool(eval(compile(text, "predicate", "eval"), {"__builtins__": {}}, values))
    except (TypeError, ArithmeticError):
        return False
