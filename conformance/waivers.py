"""Waivers: departures that an implementer knows of and gives a reason for."""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from mha.conformance.cases.case import Case
from mha.spec import CLAUSES
from mha.spec.claims import DEVICES, DTYPES

# The names and operators that the predicate `where` may use, as in `L == 0 and mask in ("padding", "full")`.
NAMES = {field.name for field in fields(Case)}
ALLOWED = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, ast.Name, ast.Load),
    *(ast.Constant, ast.Tuple, ast.List, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
    *(ast.BinOp, ast.Mult, ast.Add, ast.Sub, ast.Mod),
)
REQUIRED = ("implementation", "clause", "reason")


class WaiverError(ValueError):
    """A waiver file that cannot be used; the message says where and why."""


@dataclass(frozen=True, kw_only=True)
class Waiver:
    """One clause that one implementation is known not to keep, and why.

    dtype, device: in which alone, all if none. where: the cases, as a predicate over the fields of `Case`; a violation
    in another case is a failure. error: a part of the message that the violation must have. expires: the last day.
    """

    implementation: str
    clause: str
    reason: str
    url: str = ""
    dtype: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    where: str = ""
    error: str = ""
    expires: date | None = None

    @property
    def expired(self) -> bool:
        """Whether its last day is past."""
        return self.expires is not None and self.expires < datetime.now(UTC).date()

    @property
    def partial(self) -> bool:
        """Whether there may be violations of the clause that it does not cover."""
        return bool(self.where or self.error)

    def holds(self, case: Case) -> bool:
        """Whether it is about a case."""
        return not self.where or where_holds(self.where, case)

    def covers(self, case: Case, message: str) -> bool:
        """Whether it waives a violation."""
        return self.error in message and self.holds(case)

    def to_toml(self) -> str:
        """Return it as it stands in a waiver file."""
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        lines = [f"{name} = {_toml(value)}" for name, value in given if value]
        return "\n".join(["[[waiver]]", *lines]) + "\n"


def built_in_waivers() -> list[Waiver]:
    """Return the waivers of the implementations that this package brings."""
    resource = files("mha.implementations") / "waivers.toml"
    return _read(resource.read_text(encoding="utf-8"), "the built-in waivers")


def read_waivers(path: Path, judged: Collection[str] | None = None) -> list[Waiver]:
    """Read a waiver file: a TOML array of tables [[waiver]], with the fields of `Waiver`; the first three are required.

    judged: the implementations of the run; a waiver for another one is an error. Raises WaiverError.
    """
    try:
        found = _read(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise WaiverError(f"the waiver file {str(path)!r} cannot be read: {error}") from error
    unmatched = dict.fromkeys(w.implementation for w in found if judged is not None and w.implementation not in judged)
    if unmatched:
        raise WaiverError(
            f"{path}: it waives clauses of {', '.join(unmatched)}, which is not judged here (judged: "
            f"{', '.join(judged or ())}); correct the name, or delete the waiver"
        )
    return found


def waivers_for(waivers: Iterable[Waiver], implementation: str, clause: str, dtype: str, device: str) -> list[Waiver]:
    """Return the waivers of a clause for an implementation in a dtype on a device."""
    return [
        waiver
        for waiver in waivers
        if (waiver.implementation, waiver.clause) == (implementation, clause)
        and (not waiver.dtype or dtype in waiver.dtype)
        and (not waiver.device or device in waiver.device)
    ]


def _toml(value: Any) -> str:
    if isinstance(value, date):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read(text: str, where: str) -> list[Waiver]:
    try:
        tables: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise WaiverError(f"{where} is not TOML: {error}") from error
    entries = tables.get("waiver", [])
    if set(tables) - {"waiver"} or not isinstance(entries, list):
        raise WaiverError(f"{where} must hold only tables [[waiver]], but has {', '.join(sorted(tables))}")
    return [_waiver(entry, f"{where}, waiver {number}") for number, entry in enumerate(entries, start=1)]


def _waiver(entry: dict[str, Any], where: str) -> Waiver:
    if not isinstance(entry, dict):
        raise WaiverError(f"{where} must be a table [[waiver]], but is {entry!r}")
    known = [field.name for field in fields(Waiver)]
    unknown = sorted(set(entry) - set(known))
    missing = [name for name in REQUIRED if not entry.get(name)]
    if unknown or missing:
        problems = [f"unknown {', '.join(unknown)}"] * bool(unknown) + [f"missing {', '.join(missing)}"] * bool(missing)
        raise WaiverError(
            f"{where}: {'; '.join(problems)} (a waiver has {', '.join(REQUIRED)}, and may have "
            f"{', '.join(known[len(REQUIRED) :])})"
        )
    entry = dict(entry)
    for name, words in (("dtype", DTYPES), ("device", DEVICES)):
        given = entry.get(name, ())
        entry[name] = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else given
        if not isinstance(entry[name], tuple) or not set(map(str, entry[name])) <= set(words):
            raise WaiverError(f"{where}: {name} must be one or a list of {', '.join(words)}, but is {given!r}")
    expires = entry.pop("expires", None)
    if type(expires) not in (date, type(None)):
        raise WaiverError(f"{where}: expires must be a date, as 2030-12-31 without quotes, but is {expires!r}")
    if not all(isinstance(value, str) for name, value in entry.items() if name not in ("dtype", "device")):
        raise WaiverError(f"{where}: every value but dtype, device and expires must be a string")
    if entry["clause"] not in CLAUSES:
        raise WaiverError(f"{where}: {entry['clause']!r} is no clause of the contract")
    try:
        validate_where(entry.get("where") or "True")
    except ValueError as error:
        raise WaiverError(f"{where}: where: {error}") from None
    return Waiver(**entry, expires=expires)


def validate_where(text: str) -> None:
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


def where_holds(text: str, case: Case) -> bool:
    """Whether a valid predicate holds of a case; one that compares what cannot be compared does not."""
    values = {name: getattr(case, name) for name in NAMES}
    try:
        return bool(eval(compile(text, "predicate", "eval"), {"__builtins__": {}}, values))
    except (TypeError, ArithmeticError):
        return False
