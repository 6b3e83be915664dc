"""Predicates over the fields of a case, as waivers have them: safe to read from any file."""

from __future__ import annotations

import ast
import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from types import CodeType

from mha.conformance.cases.case import Case
from mha.conformance.cases.parsing import OLD_NAMES, is_size

# What a predicate may consist of, as in `L == 0 and mask in ("padding", "full")`.
NAMES = tuple(field.name for field in fields(Case))
ALLOWED = (
    *(ast.Expression, ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.List),
    *(ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub),
    *(ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
    *(ast.BinOp, ast.Mult, ast.Add, ast.Sub, ast.Mod),
)
NUMERIC = tuple(name for name in NAMES if is_size(name))
# In characters, in levels of nesting, and of a number: so many digits at most.
LONGEST, DEEPEST, DIGITS = 500, 32, 9
EXAMPLE = "L == 0 and mask != 'none'"


def validate_predicate(text: str) -> None:
    """Raise ValueError, in one line, unless a predicate compares fields, constants and sums."""
    for problem in _problems(text):
        raise ValueError(f"{text[:80]!r}{problem}")


def predicate_holds(text: str, case: Case) -> bool:
    """Return whether a valid predicate holds for a case, False if values cannot be compared."""
    values = {name: getattr(case, name) for name in NAMES}
    values |= {old: values[new] for old, new in OLD_NAMES.items()}
    try:
        return bool(eval(_compiled(text), {"__builtins__": {}}, values))
    except (TypeError, ArithmeticError):
        return False


@cache
def _compiled(text: str) -> CodeType:
    return compile(_parsed(text), "predicate", "eval")


def _parsed(text: str) -> ast.Expression:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an escape sequence that Python does not know
        return ast.parse(text, mode="eval")


def _problems(text: str) -> Iterator[str]:
    """Yield what is not allowed, worded to follow the text.

    Whoever stops at the first problem does not get to those that cost more to find.
    """
    if len(text) > LONGEST:
        yield f" is not an expression of at most {LONGEST} characters, but has {len(text):,}"
    try:
        tree = _parsed(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        yield f" is not an expression: {error.args[0] if error.args else 'it is too long'}"
        return
    yield from _problems_of_form(tree)
    yield from _problems_of_values(list(ast.walk(tree)))


def _problems_of_form(tree: ast.AST) -> Iterator[str]:
    if not all(isinstance(node, ALLOWED) for node in ast.walk(tree)):
        yield f' may only compare fields of a case and constants, as in "{EXAMPLE}"'
    if _depth(tree) > DEEPEST:
        yield f" is nested more than {DEEPEST} levels deep"


def _problems_of_values(nodes: Sequence[ast.AST]) -> Iterator[str]:
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    unknown = sorted(named - {*NAMES, *OLD_NAMES})
    if unknown:
        yield f": a case has no {', '.join(unknown)}; it has {', '.join(sorted(NAMES))}"
    constants = [node for node in nodes if isinstance(node, ast.Constant)]
    if not all(map(_is_plain, constants)):
        yield f" may only have texts, and numbers of at most {DIGITS} digits"
    operands = itertools.chain.from_iterable(map(_operands, nodes))
    if not all(map(_is_number, operands)):
        yield (
            " may only add, subtract, multiply and take remainders of numbers and of"
            f" {', '.join(NUMERIC)}"
        )


def _depth(tree: ast.AST) -> int:
    """Return how many levels of nodes there are."""
    depth, level = 0, [tree]
    while level:
        depth += 1
        level = list(itertools.chain.from_iterable(map(ast.iter_child_nodes, level)))
    return depth


def _is_plain(node: ast.Constant) -> bool:
    value = node.value
    if isinstance(value, bool | str | None):
        return True
    return isinstance(value, int | float) and abs(value) < 10**DIGITS


def _operands(node: ast.AST) -> list[ast.expr]:
    """Return what a node computes with."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return [node.operand]
    return []


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and not isinstance(node.value, bool)
    if isinstance(node, ast.Name):
        return node.id in NUMERIC
    return bool(_operands(node))
