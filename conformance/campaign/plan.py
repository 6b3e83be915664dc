"""The plan of a campaign, a TOML file, and its jobs, known by a hash of all that decides them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from mha.conformance.campaign.jobs import memory_shortage
from mha.conformance.campaign.targets import Targets, find_all, place_of
from mha.conformance.cases.parsing import read_case
from mha.conformance.engine.replay import failures
from mha.conformance.ranges import MEMORY, MOST_JOBS, MOST_SEEDS, MOST_WORDS, SEED, TIMEOUT, Range
from mha.conformance.reports.files import read
from mha.conformance.results import versions
from mha.conformance.settings import Settings, by_name
from mha.conformance.sources import Sources, judge_digest
from mha.conformance.waivers import parse_waivers
from mha.implementations import Resolved
from mha.spec import CLAUSES

# In GiB: with so much memory, a process can import torch on any machine.
AMPLE = 2.0
LISTS = ("implementations", "dtypes", "devices", "seeds", "clauses", "packages", "known")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a campaign judges.

    implementations: targets, as `mha check` takes them.
    dtypes, devices, profile: as of `mha check`; if None, as the project says.
    seeds: how many, from 0, or which.
    clauses: ids or families; if empty, as the project says.
    packages: installed packages that the implementations use, whose versions the results depend on
        beside their own.
    known: reports, such as the failures.json of an earlier campaign, whose failing cases are tried
        again; their jobs come first.
    group: whether a job has the clauses of a "family", or "all", which takes less time in all.
    timeout: of each process, in seconds; 0 for no limit.
    memory: of each process, in GiB; 0 for no limit.
    """

    implementations: tuple[str, ...]
    dtypes: tuple[str, ...] | None = None
    devices: tuple[str, ...] | None = None
    seeds: int | tuple[int, ...] = 1
    profile: str | None = None
    clauses: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    group: Literal["family", "all"] = "family"
    timeout: float = 3600.0
    memory: float = 8.0

    @property
    def all_seeds(self) -> Sequence[int]:
        """The seeds, each once."""
        if isinstance(self.seeds, int):
            return range(self.seeds)
        return tuple(dict.fromkeys(self.seeds))

    @property
    def limits(self) -> Limits:
        """What stops a process."""
        return Limits(self.timeout, self.memory)

    def validate(self) -> None:
        """Raise ValueError for numbers that make no sense, and for empty or endless lists."""
        for name in LISTS:
            given = getattr(self, name)
            if given == () and name in ("implementations", "dtypes", "devices"):
                raise ValueError(f"{name} is empty")
            if isinstance(given, tuple) and len(given) > MOST_WORDS:
                raise ValueError(
                    f"{name} must have at most {MOST_WORDS} entries, but has {len(given)}"
                )
        self._validate_seeds()
        if min(self.timeout, self.memory) < 0:
            raise ValueError("timeout and memory must not be negative; 0 is no limit")
        TIMEOUT.require("timeout", self.timeout)
        MEMORY.require("memory", self.memory)

    def _validate_seeds(self) -> None:
        expected = "seeds must be how many there are, or a list of numbers from 0 on"
        if not isinstance(self.seeds, int):
            if not self.seeds:
                raise ValueError(expected)
            for seed in self.seeds:
                SEED.require("each of seeds", seed)
        elif not Range(1, MOST_SEEDS).has(self.seeds):
            Range(1, MOST_SEEDS).require(f"{expected}; seeds", self.seeds)


@dataclass(frozen=True)
class Limits:
    """What stops the process of a job: seconds, and GiB of memory; 0 for no limit."""

    seconds: float = 0.0
    memory: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process judges, and all that its verdicts depend on.

    target: as `resolve` takes it.
    implementation: its name.
    sources: digests of the files that it is made of, and versions of the packages they import.
    cases: known to have failed, as clause, property and code.
    strict, require: as in `Settings`.
    waivers: of the project for these clauses of the implementation, as tables of TOML.
    versions: of the judge, torch, Python, the code of the implementation and the packages that the
        plan names.
    """

    target: str
    dtype: str
    device: str
    clauses: tuple[str, ...]
    seed: int
    profile: str
    cases: tuple[tuple[str, str, str], ...] = ()
    strict: bool = False
    require: tuple[str, ...] = ()
    waivers: tuple[str, ...] = ()
    versions: dict[str, str]
    implementation: str = ""
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The hash of the job, which names its result."""
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]

    @property
    def settings(self) -> Settings:
        """What `judge` takes."""
        return Settings(
            profile=self.profile,
            seed=self.seed,
            clauses=self.clauses,
            dtypes=(self.dtype,),
            devices=(self.device,),
            waivers=tuple(parse_waivers("\n".join(self.waivers), "the waivers of the project")),
            strict=self.strict,
            require=self.require,
            contract=self.versions["contract"],
        )

    def __str__(self) -> str:
        """Return what a line about the job begins with."""
        clauses = " to ".join(dict.fromkeys((self.clauses[0], self.clauses[-1])))
        return f"{clauses} of {self.target}, {self.dtype} on {self.device}, seed {self.seed}"


@dataclass(frozen=True)
class Campaign:
    """A plan whose words are known and whose implementations are found.

    settings: those of the whole, with the first seed.
    versions: of all that its jobs depend on.
    known: cases that failed before, as a `Job` has them, by implementation, device and dtype.
    sources: of each target.
    broken: what "all" names and cannot be used, by a failure, and why.
    missing: the same, for want of something optional.
    """

    plan: Plan
    settings: Settings
    resolved: Mapping[str, Resolved]
    versions: Mapping[str, str]
    known: Mapping[tuple[str, str, str], Collection[tuple[str, str, str]]]
    sources: Mapping[str, Sources] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(plan: Plan) -> Campaign:
        """Find the implementations.

        Raises ValueError, in one line, for a word, target or package that is unknown, for a number
        that makes no sense, and for more jobs than can be kept.
        """
        plan.validate()
        settings = Settings.of(
            plan.profile, plan.all_seeds[0], plan.clauses, plan.dtypes, plan.devices
        )
        shortage = memory_shortage(plan.memory) if plan.memory < AMPLE else ""
        if shortage:
            raise ValueError(shortage)
        versions = judge_versions(settings.contract, plan.packages)
        found = find_all(plan.implementations, plan.memory)
        for resolved in found.resolved:
            summary = summary_of(found, resolved.target)
            if summary:
                versions[f"{resolved.target} from"] = summary
        broken: dict[str, str] = {}
        missing: dict[str, str] = {}
        for each in found.unavailable:
            reasons = broken if each.broken else missing
            reasons[each.name] = each.error
        campaign = Campaign(
            plan,
            settings,
            by_name(found.resolved),
            versions,
            _known_cases(plan.known),
            found.sources,
            broken,
            missing,
        )
        campaign.validate_size()
        return campaign

    def validate_size(self) -> None:
        """Raise ValueError if there are more jobs than a folder and this process can hold."""
        groups = {}
        for resolved in self.resolved.values():
            groups[resolved.target] = len(self._groups(self.settings.of_target(resolved)))
        of_a_seed = sum(groups[resolved.target] for resolved, *_ in self.places)
        jobs = of_a_seed * len(self.plan.all_seeds)
        if jobs > MOST_JOBS:
            raise ValueError(
                f"the plan makes {jobs} jobs, but a campaign has at most {MOST_JOBS}; divide it"
            )

    @property
    def places(self) -> list[tuple[Resolved, str, str]]:
        """What is judged where: implementations, each on the devices and in dtypes it claims."""
        places = []
        for resolved in self.resolved.values():
            own, claims = self.settings.of_target(resolved), resolved.implementation.claims
            for device, dtype in product(own.devices, own.dtypes):
                if dtype in claims.dtypes and device in claims.devices:
                    places.append((resolved, device, dtype))
        return places

    @property
    def without_jobs(self) -> list[str]:
        """The implementations that claim none of the dtypes and devices."""
        judged = {each.target for each, *_ in self.places}
        return [name for name, each in self.resolved.items() if each.target not in judged]

    def jobs(self) -> Iterator[Job]:
        """Yield the jobs, those with known cases first; none where a dtype is not claimed.

        A known case belongs to the job of the first seed.
        """
        jobs = list(self._jobs())
        yield from sorted(jobs, key=lambda job: not job.cases)

    def _jobs(self) -> Iterator[Job]:
        common = judge_versions(self.settings.contract, self.plan.packages)
        for resolved, device, dtype in self.places:
            name, settings = resolved.implementation.name, self.settings.of_target(resolved)
            own = self.versions.get(f"{resolved.target} from", "")
            versions = common | {"package": own} if own else common
            sources = self.sources.get(resolved.target, Sources())
            known = self.known.get((name, device, dtype), ())
            for clauses, seed in product(self._groups(settings), self.plan.all_seeds):
                cases = []
                if seed == self.plan.all_seeds[0]:
                    cases = [case for case in known if case[0] in clauses]
                required = [clause for clause in clauses if clause in settings.require]
                waivers = [waiver for waiver in settings.waivers if waiver.concerns(name, clauses)]
                yield Job(
                    target=resolved.target,
                    dtype=dtype,
                    device=device,
                    clauses=clauses,
                    seed=seed,
                    profile=self.settings.profile,  # one for all: the jobs make one report
                    cases=tuple(cases),
                    strict=settings.strict,
                    require=tuple(required),
                    waivers=tuple(waiver.to_toml() for waiver in waivers),
                    versions=versions,
                    implementation=name,
                    sources=sources.packages | sources.files,
                )

    def _groups(self, settings: Settings) -> list[tuple[str, ...]]:
        """Return the clauses of an implementation, in the groups that make a job each."""
        groups: dict[str, list[str]] = {}
        for clause in settings.judged_clauses:
            group = CLAUSES[clause].family if self.plan.group == "family" else ""
            groups.setdefault(group, []).append(clause)
        return list(map(tuple, groups.values()))


def _known_cases(files: Collection[str]) -> dict[tuple[str, str, str], list[tuple[str, str, str]]]:
    """Return the failing cases of some reports, as `Campaign` has them."""
    known: dict[tuple[str, str, str], list[tuple[str, str, str]]] = {}
    for file in files:
        for verdict in failures(read(Path(file))):
            case = verdict.case or ""
            read_case(case)  # raises where it cannot be tried
            place = verdict.implementation, verdict.device, verdict.dtype
            known.setdefault(place, []).append((verdict.clause, verdict.violated, case))
    return known


def read_plan(file: Path) -> Plan:
    """Read a plan; raises ValueError, in one line, for a file that is not one."""
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the plan {str(file)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the plan {str(file)!r} is not valid TOML: {error}") from None
    known = [field.name for field in fields(Plan)]
    for name in data:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{file}: unknown key {name!r}{hint} (known: {', '.join(known)})")
    try:
        plan: Plan = _adapter().validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{file}: {first['loc'][0]}: {first['msg'].lower()}") from None
    try:
        plan.validate()
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return plan


def judge_versions(contract: str, packages: Collection[str] = ()) -> dict[str, str]:
    """Return the versions of the judge and its sources, torch, Python, and some packages."""
    named = {}
    for package in packages:
        try:
            named[package] = version(package)
        except PackageNotFoundError:
            raise ValueError(f"packages: {package!r} is not installed here") from None
    own = versions()
    judge = {"mha-conformance": f"{own['mha-conformance']}+{judge_digest()}"}
    return own | named | judge | {"contract": contract}


def summary_of(found: Targets, target: str) -> str:
    """Return what a target comes from, with a digest of its sources; "" for a target of ours."""
    place, sources = place_of(target), found.sources[target]
    if place.startswith("mha."):
        return ""
    if not sources.files:
        return " and ".join(f"{name} {number}" for name, number in sources.packages.items())
    name = Path(place).name if place.endswith(".py") else place
    return f"{name} {sources.digest}"


@cache
def _adapter() -> Any:
    return TypeAdapter(Plan)
