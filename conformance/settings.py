"""The settings of a run, validated once for every front end."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from mha.conformance.profiles import PROFILES, Profile
from mha.conformance.project import (
    CALL_TIMEOUT,
    PROFILE_NAMES,
    Project,
    Table,
    did_you_mean,
    read_project,
    shown_path,
)
from mha.conformance.properties.registry import properties
from mha.conformance.ranges import SEED
from mha.conformance.waivers import Waiver, built_in_waivers, read_waivers, shipped_as
from mha.implementations import Resolved
from mha.implementations.discovery.resolve import original_of, split_name
from mha.spec import CLAUSES, Claims, Implementation
from mha.spec.claims import DEVICES, DTYPES
from mha.spec.clauses import VERSIONS

# These find most by the second: the first six in wrong classes, the others among the faults that
# those miss.
FIRST = (
    *("HED-1", "MSK-2", "CFG-1", "MSK-8"),
    *("GRD-9", "STA-5", "XAT-1", "STA-4", "DRP-1", "STA-2", "CMP-4", "CAU-1", "EQV-8", "STA-7"),
)
DEFAULT_DTYPES, DEFAULT_DEVICES = ("float32", "float64"), ("cpu",)
# Of a kernel, which most often serves half precision.
KERNEL_DTYPES = ("float32", "bfloat16")
# So many clauses are named where settings are shown; more are counted.
MOST_NAMED = 6
NOTHING_LEFT = "[tool.mha] in pyproject.toml leaves no clause to judge"
T = TypeVar("T")


class Task(NamedTuple):
    """What one verdict is about, of an implementation."""

    clause: str
    dtype: str
    device: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is judged, and how thoroughly.

    profile: "quick", "default" or "thorough"; "smoke" in tests.
    seed: of the cases; the same seed gives the same cases and verdicts.
    clauses: ids, all that have a property if empty.
    dtypes, devices: names, as in torch.
    waivers: known failures, in addition to those of the built-in implementations.
    strict: a SHOULD counts as a MUST.
    contract: the version of the contract; clauses that came later are not judged.
    select, ignore: what a project judges, all if empty, and what it leaves out, where no `clauses`
        are asked for.
    require: clauses that count as a MUST, whatever their level.
    waiver_file: where the waivers are from, if it was not asked for.
    call_timeout: in seconds, after which a call that has not returned is ended with its process, 0
        for never.
    given: what `of_target` makes the settings of a single implementation from.

    Raises ValueError for an unknown word, and for a device that is not available.

    >>> Settings(profile="quick", clauses=("MSK-1",)).limits.examples
    6
    """

    profile: str = "default"
    seed: int = 0
    clauses: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = DEFAULT_DTYPES
    devices: tuple[str, ...] = DEFAULT_DEVICES
    waivers: tuple[Waiver, ...] = ()
    strict: bool = False
    contract: str = VERSIONS[-1]
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    waiver_file: str = ""
    call_timeout: float = CALL_TIMEOUT
    given: Given | None = None

    def __post_init__(self) -> None:
        """Raise ValueError, in one line, for settings that cannot be followed."""
        SEED.require("seed", self.seed)
        validate_profile(self.profile)
        validate_choice("clause", self.clauses, properties())
        for what, named in (("dtype", self.dtypes), ("device", self.devices)):
            if not named:
                raise ValueError(f"no {what} is named")
        validate_choice("dtype", self.dtypes, DTYPES)
        validate_devices(self.devices)
        if not self.judged_clauses:
            raise ValueError(f"{NOTHING_LEFT}: it ignores all that it selects")

    @classmethod
    def of(  # noqa: PLR0913  the options of every front end
        cls,
        profile: str | None = None,
        seed: int = 0,
        clauses: object = (),
        dtypes: object = None,
        devices: object = None,
        waivers: Path | Iterable[Waiver] | None = None,
        *,
        strict: bool = False,
        require: object = (),
        folder: Path = Path(),
    ) -> Settings:
        """Return the settings for what users write: families, lists with commas, dtypes of torch.

        What is not given, None, is as the project of the folder says (see `read_project`), or else
        the default.
        """
        if isinstance(waivers, Path):
            waivers = read_waivers(waivers)
        given = Given(
            project=read_project(folder),
            profile=profile,
            seed=seed,
            clauses=clauses_of(clauses),
            dtypes=None if dtypes is None else names_of(dtypes),
            devices=None if devices is None else names_of(devices),
            waivers=None if waivers is None else tuple(waivers),
            strict=strict,
            require=clauses_of(require),
        )
        return replace(given.settings(given.project.table), given=given)

    def __str__(self) -> str:
        """Return what repeats the cases of a run, and all that a project has set beside it."""
        facts = [f"profile {self.profile}, seed {self.seed}"]
        if self.contract != VERSIONS[-1]:
            facts.append(f"contract {self.contract}")
        if self.select and not self.clauses:
            facts.append(f"{_counted(self.judged_clauses)} selected by pyproject.toml")
        if self.ignored_clauses:
            facts.append(f"{_counted(self.ignored_clauses)} ignored by pyproject.toml")
        if self.raised_clauses and not self.strict:
            facts.append(f"{_counted(self.raised_clauses)} of level SHOULD required")
        if self.waiver_file and self.waivers:
            facts.append(f"waivers of {self.waiver_file}")
        return ", ".join(facts)

    @property
    def limits(self) -> Profile:
        """How far the run goes."""
        return PROFILES[self.profile]

    @property
    def judged_clauses(self) -> tuple[str, ...]:
        """The clauses that are judged, in the order of the contract; any that are asked for are."""
        if self.clauses:
            return tuple(clause for clause in properties() if clause in self.clauses)
        return tuple(clause for clause in self._selected if clause not in self.ignore)

    @property
    def ignored_clauses(self) -> tuple[str, ...]:
        """The clauses that would be judged if the project did not ignore them."""
        if self.clauses:
            return ()
        return tuple(clause for clause in self._selected if clause in self.ignore)

    @property
    def raised_clauses(self) -> tuple[str, ...]:
        """The clauses that are judged and required, and are a SHOULD, or a part of them is."""
        raised = []
        for clause in self.judged_clauses:
            levels = [prop.level for prop in properties()[clause]]
            if clause in self.require and "SHOULD" in levels:
                raised.append(clause)
        return tuple(raised)

    @property
    def _selected(self) -> list[str]:
        """The clauses of the version of the contract that the project selects."""
        known = VERSIONS[: VERSIONS.index(self.contract) + 1]
        clauses = [clause for clause in properties() if CLAUSES[clause].since in known]
        if not self.select:
            return clauses
        return [clause for clause in clauses if clause in self.select]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What is judged of each implementation, in order: `FIRST`, then that of the contract.

        Clauses that are asked for are in the order of the contract.
        """
        clauses: Iterable[str] = self.judged_clauses
        if not self.clauses:
            first = [clause for clause in FIRST if clause in clauses]
            clauses = dict.fromkeys((*first, *clauses))
        places = product(self.devices, self.dtypes)
        return tuple(Task(clause, dtype, device) for device, dtype in places for clause in clauses)

    def requires(self, clause: str, level: str) -> bool:
        """Return whether a clause must hold to conform; level: of the property that decides."""
        return self.strict or level != "SHOULD" or clause in self.require

    def waivers_of(self, implementation: Implementation) -> tuple[Waiver, ...]:
        """Return the waivers that may apply: built-in ones if it is one of ours, then the given."""
        name = shipped_as(original_of(implementation))
        of_ours = [waiver for waiver in built_in_waivers() if waiver.implementation == name]
        own = [replace(waiver, implementation=implementation.name) for waiver in of_ours]
        return (*own, *self.waivers)

    def of_target(self, resolved: Resolved) -> Settings:
        """Return the settings for one implementation, which may have a table in pyproject.toml.

        Raises ValueError where that cannot be followed here, as for a missing file or device.
        """
        if self.given is None:
            return self
        _, target = split_name(resolved.target)
        table = self.given.project.table_of(target, resolved.implementation.name)
        settings = self.given.settings(table) if table else replace(self, given=None)
        if self.given.dtypes or (table or self.given.project.table).dtypes:
            return settings
        return replace(settings, dtypes=usual_dtypes(resolved.implementation.claims))

    def at(self, dtype: str, device: str) -> Settings:
        """Return the same settings in one dtype, on one device."""
        return replace(self, dtypes=(dtype,), devices=(device,))

    def of_report(self, chosen: Iterable[Resolved]) -> Settings:
        """Return the settings for a report on several implementations: all dtypes and devices.

        The profile is the least thorough one, so that a report does not claim more than was tried.
        """
        profiles, dtypes, devices = list[str](), list[str](), list[str]()
        for settings in [self.of_target(resolved) for resolved in chosen] or [self]:
            profiles.append(settings.profile)
            dtypes += settings.dtypes
            devices += settings.devices
        return replace(
            self,
            profile=min(profiles, key=list(PROFILES).index),
            dtypes=tuple(dict.fromkeys(dtypes)),
            devices=tuple(dict.fromkeys(devices)),
        )


def usual_dtypes(claims: Claims) -> tuple[str, ...]:
    """Return the dtypes to judge by default: all that are claimed, where no usual one is.

    >>> usual_dtypes(Claims(projections=False, dtypes={"float16", "float32"}))
    ('float32',)
    >>> usual_dtypes(Claims(dtypes={"float16"}))
    ('float16',)
    """
    if claims.projections and set(claims.dtypes) & set(DEFAULT_DTYPES):
        return DEFAULT_DTYPES
    usual = () if claims.projections else KERNEL_DTYPES
    claimed = tuple(dtype for dtype in usual if dtype in claims.dtypes)
    return claimed or tuple(dtype for dtype in DTYPES if dtype in claims.dtypes)


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a user has given, as of `Settings`, or None where the project is asked."""

    project: Project
    profile: str | None
    seed: int
    clauses: tuple[str, ...]
    dtypes: tuple[str, ...] | None
    devices: tuple[str, ...] | None
    waivers: tuple[Waiver, ...] | None
    strict: bool
    require: tuple[str, ...]

    def settings(self, table: Table) -> Settings:
        """Return the settings, with a table of the project for what is not given."""
        project, file = self.project, table.waivers or self.project.waivers
        is_read = self.waivers is None and (table.waivers is not None or file.exists())
        waivers, shown = self.waivers or (), ""
        if is_read:
            shown = shown_path(file)
            waivers = tuple(read_waivers(Path(shown)))
        return Settings(
            profile=_first_given(self.profile, table.profile, "default"),
            seed=self.seed,
            clauses=self.clauses,
            dtypes=_first_given(self.dtypes, table.dtypes, DEFAULT_DTYPES),
            devices=_first_given(self.devices, table.device, DEFAULT_DEVICES),
            waivers=waivers,
            strict=self.strict or project.strict,
            contract=project.contract,
            select=table.select or (),
            ignore=table.ignore or (),
            require=(*self.require, *(table.require or ())),
            waiver_file=shown,
            call_timeout=project.call_timeout,
        )


def _first_given(value: T | None, of_project: T | None, default: T) -> T:
    if value is not None:
        return value
    return default if of_project is None else of_project


def _counted(clauses: Collection[str]) -> str:
    """Return how many clauses there are, and which if they are few."""
    number = "1 clause" if len(clauses) == 1 else f"{len(clauses)} clauses"
    if 0 < len(clauses) <= MOST_NAMED:
        return f"{number} ({', '.join(clauses)})"
    return number


def names_of(given: object) -> tuple[str, ...]:
    """Return the words in a text with commas, in a dtype of torch, or in each of several of these.

    >>> names_of("float32,float64"), names_of([torch.float16])
    (('float32', 'float64'), ('float16',))
    """
    if isinstance(given, str):
        return tuple(word.strip() for word in given.split(",") if word.strip())
    if isinstance(given, torch.dtype):
        return (str(given).removeprefix("torch."),)
    if isinstance(given, Iterable):
        return tuple(word for each in given for word in names_of(each))
    raise ValueError(f"expected a name, or several, but got {given!r:.80}")


def clauses_of(given: object) -> tuple[str, ...]:
    """Return the ids of clauses that words name, each an id or the letters of a family.

    Raises ValueError for an unknown word.

    >>> clauses_of("cau-1,STA")[:3]
    ('CAU-1', 'STA-1', 'STA-2')
    """
    words = [word.upper() for word in names_of(given)]
    families = list(dict.fromkeys(CLAUSES[clause].family for clause in properties()))
    if not words and (given or isinstance(given, str)):
        raise ValueError("no clause is named; leave it out to judge all of them")
    for word in words:
        if word not in (*properties(), *families):
            hint = did_you_mean(word, [*properties(), *families])
            raise ValueError(
                f"unknown clause {word!r}{hint} (`mha spec` lists the clauses; the families are"
                f" {', '.join(families)})"
            )
    return tuple(
        clause for clause in properties() if clause in words or CLAUSES[clause].family in words
    )


def validate_choice(what: str, words: Collection[str], known: Collection[str]) -> None:
    """Raise ValueError unless every word is known."""
    for word in words:
        if word not in known:
            hint = did_you_mean(word, known)
            known_words = f"{hint} Known: " if hint else "; known: "
            raise ValueError(f"unknown {what} {word!r}{known_words}{', '.join(known)}")


def validate_profile(name: str) -> None:
    """Raise ValueError unless a profile is known; "smoke" is not offered."""
    if name not in PROFILES:
        validate_choice("profile", [name], PROFILE_NAMES)


def validate_devices(devices: Collection[str]) -> None:
    """Raise ValueError unless every device is known and available."""
    validate_choice("device", devices, DEVICES)
    if "cuda" in devices and not torch.cuda.is_available():
        raise ValueError(
            "the device 'cuda' was asked for, but torch finds no CUDA device here; judge on 'cpu'"
        )


def by_name(resolved: Iterable[Resolved]) -> dict[str, Resolved]:
    """Return what was resolved by name; raise ValueError where two implementations share one.

    One implementation may be given twice; the first target counts.
    """
    named: dict[str, Resolved] = {}
    for each in resolved:
        name = each.implementation.name
        first = named.setdefault(name, each)
        if first.implementation is not each.implementation and first.target != each.target:
            _, target = split_name(each.target)
            raise ValueError(
                f"two implementations are named {name!r}; name one differently: NAME={target}"
            )
    return named
