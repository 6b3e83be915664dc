"""Waivers: known failures that an implementer accepts, each with a reason."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime, timedelta
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from mha.conformance.cases.case import Case
from mha.conformance.predicates import predicate_holds, validate_predicate
from mha.spec import CLAUSES, Implementation
from mha.spec.claims import DEVICES, DTYPES

REQUIRED = ("implementation", "clause", "reason")
LISTS = {"dtype": DTYPES, "device": DEVICES}
TEXTS = (*REQUIRED, "url", "where", "error")
# So long before a waiver expires, runs say so.
NOTICE = timedelta(days=30)


class WaiverError(ValueError):
    """A waiver or a waiver file that cannot be used; the message says where and why in a line."""


@dataclass(frozen=True, kw_only=True)
class Waiver:
    """A clause that an implementation is known not to keep, and why that is accepted.

    dtype, device: where it applies; everywhere if empty.
    where: the cases it applies to, as a predicate over the fields of `Case`; a failure in any other
        case still counts.
    error: a part of the message that the failure must have.
    expires: the last day.

    Raises WaiverError, in one line, for a value that is not valid.

    >>> Waiver(implementation="sdpa", clause="MSK-8", reason="no empty row", where="L > 0").partial
    True
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

    def __post_init__(self) -> None:
        """Validate every field, and make one word of `dtype` or `device` a tuple."""
        for name, known in LISTS.items():
            object.__setattr__(self, name, _words(name, getattr(self, name), known))
        if type(self.expires) not in (date, type(None)):
            raise WaiverError(
                "expires must be a date such as 2030-12-31, without quotes, but is"
                f" {self.expires!r:.80}"
            )
        for name in TEXTS:
            if not isinstance(getattr(self, name), str):
                raise WaiverError(f"{name} must be a string, but is {getattr(self, name)!r:.80}")
        if self.clause not in CLAUSES:
            raise WaiverError(f"unknown clause {self.clause!r:.80}; `mha spec` lists them")
        if not self.reason.strip():
            raise WaiverError("a waiver needs a reason: say why the failure is accepted")
        if self.where:
            validate_where(self.where)

    @property
    def expired(self) -> bool:
        """Whether its last day is past."""
        return self.expires is not None and self.expires < datetime.now(UTC).date()

    @property
    def expires_soon(self) -> bool:
        """Whether its last day is near."""
        soon = datetime.now(UTC).date() + NOTICE
        return self.expires is not None and not self.expired and self.expires <= soon

    @property
    def partial(self) -> bool:
        """Whether there may be failures of the clause that it does not cover."""
        return bool(self.where or self.error)

    def concerns(self, implementation: str, clauses: Collection[str]) -> bool:
        """Whether it is about one of these clauses of an implementation."""
        return self.implementation == implementation and self.clause in clauses

    def holds(self, case: Case) -> bool:
        """Whether it applies to a case."""
        return not self.where or where_holds(self.where, case)

    def covers(self, case: Case, message: str) -> bool:
        """Whether it waives a failure."""
        return self.error in message and self.holds(case)

    def to_toml(self) -> str:
        """Return the table of a waiver file that holds it."""
        lines = ["[[waiver]]"]
        for field in fields(self):
            value = getattr(self, field.name)
            if value:
                lines.append(f"{field.name} = {_toml(value)}")
        return "\n".join(lines) + "\n"


@cache
def built_in_waivers() -> tuple[Waiver, ...]:
    """Return the waivers for the implementations that this package ships."""
    resource = files("mha.implementations") / "waivers.toml"
    return tuple(parse_waivers(resource.read_text(encoding="utf-8"), "the built-in waivers"))


def shipped_as(implementation: Implementation) -> str:
    """Return the name under which this package ships an implementation, "" for any other one.

    One that another process has (see `mha.conformance.engine.subjects`) says it itself.
    """
    named = getattr(implementation, "shipped_as", None)
    if isinstance(named, str):
        return named
    name: str = implementation.name
    module = sys.modules.get(f"mha.implementations.{name}")
    if getattr(module, "implementation", None) is implementation:
        return name
    return ""


def read_waivers(path: Path, judged: Collection[str] | None = None) -> list[Waiver]:
    """Read a waiver file: a TOML array of tables [[waiver]] with the fields of `Waiver`.

    judged: the implementations of the run; a waiver for any other one is an error.

    Raises WaiverError.
    """
    try:
        waivers = parse_waivers(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise WaiverError(f"the waiver file {str(path)!r} cannot be read: {why}") from error
    if judged is not None:
        validate_judged(waivers, path, judged)
    return waivers


def validate_judged(waivers: Iterable[Waiver], path: Path, judged: Collection[str]) -> None:
    """Raise WaiverError for a waiver, of the file at `path`, of what is not judged."""
    names = dict.fromkeys(waiver.implementation for waiver in waivers)
    unmatched = [name for name in names if name not in judged]
    if unmatched:
        raise WaiverError(
            f"{path}: waives clauses of {', '.join(unmatched)}, which is not judged in this run"
            f" (judged: {', '.join(judged)}); correct the name, or delete the waiver"
        )


def expiry_notes(waivers: Iterable[Waiver], judged: Collection[str]) -> list[str]:
    """Return a sentence for each waiver of these implementations that expires soon."""
    notes = []
    for waiver in waivers:
        if waiver.expires_soon and waiver.implementation in judged:
            what = f"the waiver of {waiver.clause} for {waiver.implementation}"
            notes.append(f"{what} expires on {waiver.expires}: {waiver.reason}")
    return notes


def waivers_for(
    waivers: Iterable[Waiver], implementation: str, clause: str, dtype: str, device: str
) -> list[Waiver]:
    """Return the waivers of a clause for an implementation in a dtype on a device."""
    found = []
    for waiver in waivers:
        is_here = dtype in (waiver.dtype or DTYPES) and device in (waiver.device or DEVICES)
        if is_here and waiver.concerns(implementation, [clause]):
            found.append(waiver)
    return found


def validate_where(text: str) -> None:
    """Raise WaiverError unless a predicate compares fields of a case and constants."""
    try:
        validate_predicate(text)
    except ValueError as error:
        raise WaiverError(f"where: {error}") from None


def where_holds(text: str, case: Case) -> bool:
    """Return whether a valid predicate holds for a case, False if values cannot be compared."""
    return predicate_holds(text, case)


def _toml(value: Any) -> str:
    if isinstance(value, date):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_waivers(text: str, source: str) -> list[Waiver]:
    """Return the waivers in the text of a file; raise WaiverError, which names file and table."""
    try:
        tables: Any = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise WaiverError(f"{source} is not valid TOML: {error}") from error
    entries = tables.get("waiver", [])
    if set(tables) - {"waiver"} or not isinstance(entries, list):
        raise WaiverError(
            f"{source} must hold only tables [[waiver]], but has {', '.join(sorted(tables))}"
        )
    waivers = []
    for number, entry in enumerate(entries, start=1):
        try:
            waivers.append(_waiver(entry))
        except WaiverError as error:
            raise WaiverError(f"{source}, waiver {number}: {error}") from None
    return waivers


def _waiver(entry: Any) -> Waiver:
    """Return the waiver of a table of a file."""
    if not isinstance(entry, dict):
        raise WaiverError(f"must be a table [[waiver]], but is {entry!r:.80}")
    names = [field.name for field in fields(Waiver)]
    unknown = ", ".join(sorted(set(entry) - set(names)))
    missing = ", ".join(name for name in REQUIRED if not entry.get(name))
    if unknown or missing:
        problems = []
        if unknown:
            problems.append(f"unknown {unknown}")
        if missing:
            problems.append(f"missing {missing}")
        optional = ", ".join(names[len(REQUIRED) :])
        raise WaiverError(
            f"{'; '.join(problems)} (required: {', '.join(REQUIRED)}; optional: {optional})"
        )
    return Waiver(**entry)


def _words(name: str, given: Any, known: Collection[str]) -> tuple[str, ...]:
    """Return one word or a list of words as a tuple; raise WaiverError for an unknown one."""
    words = [given] if isinstance(given, str) else given
    if not isinstance(words, (list, tuple)) or not all(word in known for word in words):
        raise WaiverError(
            f"{name} must be one or a list of {', '.join(known)}, but is {given!r:.80}"
        )
    return tuple(words)
