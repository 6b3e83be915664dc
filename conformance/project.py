"""What the pyproject.toml of a user's project says to the judge.

Torch is not imported, since every pytest run reads this.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mha.conformance.ranges import SECONDS
from mha.spec.claims import DEVICES, DTYPES
from mha.spec.clauses import CLAUSES, FAMILIES, VERSIONS

PROFILE_NAMES = ("quick", "default", "thorough")
# Read by default from the root of a project, and written by `mha waive`.
WAIVERS = "mha_waivers.toml"
# In seconds; a correct call on the largest cases takes a few.
CALL_TIMEOUT = 60.0


@dataclass(frozen=True, kw_only=True)
class Table:
    """The keys that `[tool.mha]` and the table of a target share; None where one is not given.

    dtypes, device: names.
    waivers: an absolute path.
    select, ignore, require: ids of clauses.
    """

    profile: str | None = None
    dtypes: tuple[str, ...] | None = None
    device: tuple[str, ...] | None = None
    waivers: Path | None = None
    select: tuple[str, ...] | None = None
    ignore: tuple[str, ...] | None = None
    require: tuple[str, ...] | None = None

    def over(self, general: Table) -> Table:
        """Return a table in which each key of this one takes the place of the general one."""
        own: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None:
                own[each.name] = value
        return replace(general, **own)


@dataclass(frozen=True, kw_only=True)
class Project:
    """A project, and what its pyproject.toml says.

    folder: the root, that of the pyproject.toml, or the current folder where there is none.
    call_timeout: in seconds, after which a call that has not returned is ended with its process, 0
        for never.
    targets: tables by the target, the path of a file made absolute, or by the name of an
        implementation.
    text: `[tool.mha]` as JSON, empty if there is none.
    """

    folder: Path
    table: Table = field(default_factory=Table)
    contract: str = field(default_factory=lambda: VERSIONS[-1])
    strict: bool = False
    call_timeout: float = CALL_TIMEOUT
    targets: Mapping[str, Table] = field(default_factory=dict)
    text: str = ""

    @property
    def waivers(self) -> Path:
        """The file that `mha waive` adds to, and that is read by default."""
        return self.table.waivers or self.folder / WAIVERS

    def table_of(self, target: str, name: str) -> Table | None:
        """Return the table of an implementation over the general one, None if it has none.

        target: without a name.
        """
        own = self.targets.get(absolute_target(target, Path())) or self.targets.get(name)
        return own.over(self.table) if own else None

    def waivers_of(self, target: str, name: str) -> Path:
        """Return the file with the waivers of an implementation, by its target or its name."""
        table = self.table_of(target, name) or self.table
        return table.waivers or self.waivers


def pinned_contract(folder: Path) -> str:
    """Return the version of the contract that a project has pinned, or else the latest one."""
    return read_project(folder).contract


def read_project(folder: Path) -> Project:
    """Return what `[tool.mha]` says in the pyproject.toml of a folder, or of the next one above it.

    Raises ValueError, in one line, for a file that is not TOML, an unknown key and a value that is
    not expected.
    """
    places = (folder.resolve(), *folder.resolve().parents)
    files = [place / "pyproject.toml" for place in places]
    file = next(filter(Path.is_file, files), None)
    if file is None:
        return Project(folder=folder.resolve())
    table = _tool_table(file)
    if table is None:
        return Project(folder=file.parent)
    where = f"{str(file)!r}, [tool.mha]"
    own = _read(table, {**_COMMON, **_GENERAL}, where, file.parent)
    general = {name: own.pop(name) for name in _GENERAL if name in own}
    text = json.dumps(table, sort_keys=True, default=str)
    return Project(folder=file.parent, table=Table(**own), text=text, **general)


def absolute_target(target: str, folder: Path) -> str:
    """Return a target with the path of its file made absolute, so that a file has one name.

    >>> absolute_target("sdpa", Path()), absolute_target("./a.py:A", Path("/x"))
    ('sdpa', '/x/a.py:A')
    """
    place, _, name = target.rpartition(":")
    if not place.endswith(".py"):
        return target
    return f"{(folder / place).resolve()}:{name}"


def shown_path(file: Path) -> str:
    """Return a path as a user would write it here: relative, if it is in the current folder."""
    here = Path().resolve()
    if file.is_relative_to(here):
        file = file.relative_to(here)
    return str(file)


def did_you_mean(word: str, known: Iterable[str], most: int = 3) -> str:
    """Return the end of an error about an unknown word, "" if it is like no known one.

    >>> did_you_mean("quik", PROFILE_NAMES)
    '; did you mean quick?'
    """
    near = get_close_matches(word, list(known), n=most)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _tool_table(file: Path) -> Any:
    """Return `[tool.mha]` of a file, None if there is none."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        tool = tomllib.loads(text).get("tool", {})
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) or "[tool.mha" not in text:
            return None  # it is about other tools, whose runs must not end here
        raise ValueError(f"{str(file)!r} cannot be read as TOML: {error}") from None
    return tool.get("mha") if isinstance(tool, dict) else None


def _read(table: object, keys: Mapping[str, _Reader], where: str, folder: Path) -> dict[str, Any]:
    """Return the values of a table, as its keys are read; where: the table, in errors."""
    if not isinstance(table, dict):
        raise ValueError(f"{where} must be a table, but is {table!r:.80}")
    values = {}
    for name, value in table.items():
        if name not in keys:
            hint = did_you_mean(name, keys, most=1)
            raise ValueError(f"{where}: unknown key {name!r}{hint} (known: {', '.join(keys)})")
        values[name] = keys[name](value, f"{where}: {name}", folder)
    return values


def _words(value: object, what: str, known: Collection[str]) -> tuple[str, ...]:
    """Return one word or a list of words; raise ValueError for none and for an unknown one."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not words or not all(word in known for word in words):
        raise ValueError(
            f"{what} must be one or a list of {', '.join(known)}, but is {value!r:.80}"
        )
    return tuple(words)


def _word(value: object, what: str, known: Collection[str]) -> str:
    if value not in known:
        raise ValueError(f"{what} must be {' or '.join(map(repr, known))}, but is {value!r:.80}")
    return str(value)


def _clauses(value: object, what: str, folder: Path) -> tuple[str, ...]:
    """Return the ids that a word or a list of words names, each an id or a family, if any."""
    words = [value] if isinstance(value, str) else value
    expected = 'a list of clauses or families, such as ["MSK-8", "CAU"]'
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{what} must be {expected}, but is {value!r:.80}")
    named = [word.upper() for word in words]
    for word in named:
        if word not in (*CLAUSES, *FAMILIES):
            hint = did_you_mean(word, [*CLAUSES, *FAMILIES])
            raise ValueError(
                f"{what} must be {expected}, but there is no {word!r}{hint} (`mha spec` lists them)"
            )
    return tuple(clause for clause in CLAUSES if clause in named or CLAUSES[clause].family in named)


def _selected(value: object, what: str, folder: Path) -> tuple[str, ...]:
    clauses = _clauses(value, what, folder)
    if not clauses:
        raise ValueError(f"{what} selects nothing; leave it out to judge all clauses")
    return clauses


def _path(value: object, what: str, folder: Path) -> Path:
    if not isinstance(value, str) or not value:
        raise ValueError(
            f'{what} must be the path of a file, such as "{WAIVERS}", but is {value!r:.80}'
        )
    return folder / value


def _flag(value: object, what: str, folder: Path) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be true or false, but is {value!r:.80}")
    return value


def _seconds(value: Any, what: str, folder: Path) -> float:
    SECONDS.require(what, value)
    return float(value)


def _targets(value: object, what: str, folder: Path) -> dict[str, Table]:
    where = what.removesuffix("]: targets")
    if not isinstance(value, dict):
        raise ValueError(f"{what} must hold a table for each target, but is {value!r:.80}")
    tables = {}
    for target, table in value.items():
        values = _read(table, _COMMON, f'{where}.targets."{target}"]', folder)
        tables[absolute_target(target, folder)] = Table(**values)
    return tables


# Each takes a value, what to call it in an error, and the root of the project.
_Reader = Callable[[object, str, Path], Any]
_COMMON: dict[str, _Reader] = {
    "profile": lambda value, what, _: _word(value, what, PROFILE_NAMES),
    "dtypes": lambda value, what, _: _words(value, what, DTYPES),
    "device": lambda value, what, _: _words(value, what, DEVICES),
    "waivers": _path,
    "select": _selected,
    "ignore": _clauses,
    "require": _clauses,
}
_GENERAL: dict[str, _Reader] = {
    "contract": lambda value, what, _: _word(value, what, VERSIONS),
    "strict": _flag,
    "call_timeout": _seconds,
    "targets": _targets,
}
