"""Waivers: departures that an implementer knows of and gives a reason for."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from mha.spec import CLAUSES

KEYS = {"implementation", "clause", "reason", "url"}


class WaiverError(ValueError):
    """A waiver file that cannot be used; the message says where and why."""


@dataclass(frozen=True)
class Waiver:
    """One clause that one implementation is known not to keep, and why."""

    implementation: str
    clause: str
    reason: str
    url: str = ""


def built_in_waivers() -> list[Waiver]:
    """Return the waivers of the implementations that this package brings."""
    resource = files("mha.implementations") / "waivers.toml"
    return _read(resource.read_text(encoding="utf-8"), "the built-in waivers")


def read_waivers(path: Path) -> list[Waiver]:
    """Read a waiver file: a TOML array of tables [[waiver]], each with implementation, clause, reason and maybe url."""
    try:
        return _read(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise WaiverError(f"the waiver file {str(path)!r} cannot be read: {error}") from error


def find_waiver(waivers: Iterable[Waiver], implementation: str, clause: str) -> Waiver | None:
    """Return the waiver of a clause for an implementation, if there is one."""
    return next((w for w in waivers if (w.implementation, w.clause) == (implementation, clause)), None)


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
    unknown, missing = set(entry) - KEYS, (KEYS - {"url"}) - {key for key, value in entry.items() if value}
    if unknown or missing:
        problems = [f"unknown {', '.join(sorted(unknown))}"] * bool(unknown)
        problems += [f"missing {', '.join(sorted(missing))}"] * bool(missing)
        raise WaiverError(
            f"{where}: {'; '.join(problems)} (a waiver has {', '.join(sorted(KEYS))}; only url may be left out)"
        )
    if not all(isinstance(value, str) for value in entry.values()):
        raise WaiverError(f"{where}: every value must be a string")
    if entry["clause"] not in CLAUSES:
        raise WaiverError(f"{where}: {entry['clause']!r} is no clause of the contract")
    return Waiver(**entry)
