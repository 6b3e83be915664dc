"""The settings of a run, validated once for every front end."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from mha.conformance.cases.boundary import NO_LIMIT
from mha.conformance.project import (
    CALL_TIMEOUT,
    PROFILE_NAMES,
    Project,
    Table,
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


@dataclass(frozen=True)
class Profile:
    """How far a run goes.

    boundary: the most boundary cases of a property; a few cover every level of every field and most
        pairs of levels, all of them cover every pair.
    examples: the random cases of each property, after the boundary cases.
    longest: the longest L and S of most properties; long_rows: of those about long rows.
    timeout: in seconds, of one clause under pytest-timeout, where no other is set; 0 for none.
    float64_every: in float64, one in so many of these cases is tried where float32 is judged in the
        same run: of the known faults, float32 finds what the others would (docs/bugfinding.md).
    ranks: the most ranks of a sharded implementation.
    slow: whether properties whose single case takes many seconds are tried.
    sensitivity: whether the cases must be seen to reject known-bad answers.
    """

    boundary: int
    examples: int
    longest: int
    long_rows: int
    timeout: int
    float64_every: int = 1
    ranks: int = 2
    slow: bool = True
    sensitivity: bool = True

    @property
    def is_partial(self) -> bool:
        """Whether boundary cases are left out, so that a clause may fail where none was tried."""
        return self.boundary < NO_LIMIT


# From the least thorough to the most. "smoke" serves tests of this package: a case of each property
# proves too little of an implementation, so it is not among `PROFILE_NAMES`.
PROFILES = {
    "smoke": Profile(1, 0, 33, 512, 300, float64_every=2, slow=False, sensitivity=False),
    "quick": Profile(18, 6, 33, 512, 300, float64_every=2, slow=False),
    "default": Profile(NO_LIMIT, 20, 260, 4096, 900, float64_every=2),
    "thorough": Profile(NO_LIMIT, 1000, 520, 65536, 0, ranks=4),
}


T = TypeVar("T")


class Task(NamedTuple):
    """What one verdict is about, of an implementation."""

    clause: str
    dtype: str
    device: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is judged, and how thoroughly.

    profile: "quick", "default" or "thorough"; "smoke" in tests. seed: of the cases; the same seed
        gives the same cases and verdicts.
    clauses: ids, all that have a property if empty. dtypes, devices: names, as in torch.
    waivers: known failures, in addition to those of the built-in implementations. strict: a SHOULD
        counts as a MUST.
    contract: the version of the contract; clauses that came later are not judged.
    select, ignore: what a project judges, all if empty, and what it leaves out, where no `clauses`
        are asked for.
    require: clauses that count as a MUST, whatever their level.
    waiver_file: where the waivers are from, if it was not asked for. call_timeout: in seconds,
        after which a call that has not returned is ended with its process, 0 for never. given: what
        `of_target` makes the settings of a single implementation from. Raises ValueError for an
        unknown word, and for a device that is not available.

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
        for what, given in (("dtype", self.dtypes), ("device", self.devices)):
            if not given:
                raise ValueError(f"no {what} is named")
        validate_choice("dtype", self.dtypes, DTYPES)
        validate_devices(self.devices)
        if not self.judged_clauses:
            raise ValueError(
                "[tool.mha] in pyproject.toml leaves no clause to judge: it ignores all that it"
                " selects"
            )

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
        """Return the settings for what users write: families and lists with commas, and dtypes of
        torch.

        What is not given, None, is as the project of the folder says (see `read_project`), or else
        the default.
        """
        given_waivers = read_waivers(waivers) if isinstance(waivers, Path) else waivers
        given = Given(
            project=read_project(folder),
            profile=profile,
            seed=seed,
            clauses=clauses_of(clauses),
            dtypes=None if dtypes is None else names_of(dtypes),
            devices=None if devices is None else names_of(devices),
            waivers=None if given_waivers is None else tuple(given_waivers),
            strict=strict,
            require=clauses_of(require),
        )
        return replace(given.settings(given.project.table), given=given)

    def __str__(self) -> str:
        """Return what repeats the cases of a run, and everything that a project has set beside it."""
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
        chosen = self.clauses or [clause for clause in self._selected if clause not in self.ignore]
        return tuple(clause for clause in properties() if clause in chosen)

    @property
    def ignored_clauses(self) -> tuple[str, ...]:
        """The clauses that would be judged if the project did not ignore them."""
        return (
            ()
            if self.clauses
            else tuple(clause for clause in self._selected if clause in self.ignore)
        )

    @property
    def raised_clauses(self) -> tuple[str, ...]:
        """The clauses of level SHOULD, or with a part of that level, that are judged and required."""
        return tuple(
            clause
            for clause in self.judged_clauses
            if clause in self.require and _is_advice(clause)
        )

    @property
    def _selected(self) -> list[str]:
        """The clauses of the version of the contract that the project selects."""
        known = VERSIONS[: VERSIONS.index(self.contract) + 1]
        clauses = [clause for clause in properties() if CLAUSES[clause].since in known]
        return [clause for clause in clauses if not self.select or clause in self.select]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What is judged of each implementation, in order: that of the contract, but if all of it
        is, `FIRST` first.
        """
        first = FIRST if not self.clauses else ()
        clauses = sorted(
            self.judged_clauses, key=lambda x: first.index(x) if x in first else len(first)
        )
        places = product(self.devices, self.dtypes)
        return tuple(Task(clause, dtype, device) for device, dtype in places for clause in clauses)

    def requires(self, clause: str, level: str) -> bool:
        """Return whether a clause must hold for an implementation to conform; level: of the
        property that decides.
        """
        return self.strict or level != "SHOULD" or clause in self.require

    def waivers_of(self, implementation: Implementation) -> tuple[Waiver, ...]:
        """Return the waivers that may apply to it: the built-in ones if this package ships it, then
        the user's.
        """
        name = shipped_as(original_of(implementation))
        of_ours = [waiver for waiver in built_in_waivers() if waiver.implementation == name]
        own = [replace(waiver, implementation=implementation.name) for waiver in of_ours]
        return (*own, *self.waivers)

    def of_target(self, resolved: Resolved) -> Settings:
        """Return the settings for one implementation, which may have a table of its own in
        pyproject.toml.

        Raises ValueError where that cannot be followed here; the tables of what is not judged may
        name a missing file or device.
        """
        if self.given is None:
            return self
        table = self.given.project.table_of(
            split_name(resolved.target)[1], resolved.implementation.name
        )
        settings = self.given.settings(table) if table else replace(self, given=None)
        if self.given.dtypes or (table or self.given.project.table).dtypes:
            return settings
        return replace(settings, dtypes=usual_dtypes(resolved.implementation.claims))

    def at(self, dtype: str, device: str) -> Settings:
        """Return the same settings in one dtype, on one device."""
        return replace(self, dtypes=(dtype,), devices=(device,))

    def of_report(self, chosen: Iterable[Resolved]) -> Settings:
        """Return the settings for a report on several implementations, with all their dtypes and
        devices.

        The profile is the least thorough one, so that a report does not claim more than was tried.
        """
        each = [self.of_target(resolved) for resolved in chosen] or [self]
        profiles = [settings.profile for settings in each]
        dtypes = chain.from_iterable(settings.dtypes for settings in each)
        devices = chain.from_iterable(settings.devices for settings in each)
        return replace(
            self,
            profile=min(profiles, key=list(PROFILES).index),
            dtypes=tuple(dict.fromkeys(dtypes)),
            devices=tuple(dict.fromkeys(devices)),
        )


def usual_dtypes(claims: Claims) -> tuple[str, ...]:
    """Return in which dtypes an implementation is judged by default: all that are claimed, where no
    usual one is.

    >>> usual_dtypes(Claims(projections=False, dtypes={"float16", "float32"})), usual_dtypes(Claims(dtypes={"float16"}))
    (('float32',), ('float16',))
    """
    if claims.projections and set(claims.dtypes) & set(DEFAULT_DTYPES):
        return DEFAULT_DTYPES
    usual = tuple(
        dtype for dtype in KERNEL_DTYPES if dtype in claims.dtypes and not claims.projections
    )
    return usual or tuple(dtype for dtype in DTYPES if dtype in claims.dtypes)


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a user has given, None where it is for the project to say; the other fields are those of
    `Settings`.
    """

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
        return Settings(
            profile=_first_given(self.profile, table.profile, "default"),
            seed=self.seed,
            clauses=self.clauses,
            dtypes=_first_given(self.dtypes, table.dtypes, DEFAULT_DTYPES),
            devices=_first_given(self.devices, table.device, DEFAULT_DEVICES),
            waivers=tuple(read_waivers(Path(shown_path(file)))) if is_read else self.waivers or (),
            strict=self.strict or project.strict,
            contract=project.contract,
            select=table.select or (),
            ignore=table.ignore or (),
            require=(*self.require, *(table.require or ())),
            waiver_file=shown_path(file) if is_read else "",
            call_timeout=project.call_timeout,
        )


def _first_given(*values: T | None) -> T:
    return next(value for value in values if value is not None)


def _is_advice(clause: str) -> bool:
    """Return whether a clause, or a part of it, is a SHOULD."""
    return any(prop.level == "SHOULD" for prop in properties()[clause])


def _counted(clauses: Collection[str]) -> str:
    """Return how many clauses there are, and which if they are few."""
    number = f"{len(clauses)} clause{'s' * (len(clauses) != 1)}"
    return f"{number} ({', '.join(clauses)})" if 0 < len(clauses) <= MOST_NAMED else number


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
            near = get_close_matches(word, [*properties(), *families], n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(
                f"unknown clause {word!r}{hint} (`mha spec` lists the clauses; the families are"
                f" {', '.join(families)})"
            )
    return tuple(
        clause
        for clause in properties()
        for word in words
        if word in (clause, CLAUSES[clause].family)
    )


def validate_choice(what: str, words: Collection[str], known: Collection[str]) -> None:
    """Raise ValueError unless every word is known."""
    for word in words:
        if word not in known:
            near = get_close_matches(word, known, n=3)
            hint = f"did you mean {' or '.join(near)}? Known: " if near else "known: "
            raise ValueError(f"unknown {what} {word!r}; {hint}{', '.join(known)}")


def validate_profile(name: str) -> None:
    """Raise ValueError unless a profile is known."""
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
    """Return what was resolved by the implementations' names, or raise ValueError where two share
    one.

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
