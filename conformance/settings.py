"""The settings of a run, validated once for every front end."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from mha.conformance.cases.boundary import NO_LIMIT
from mha.conformance.project import pinned_contract
from mha.conformance.properties.registry import properties
from mha.conformance.waivers import Waiver, built_in_waivers, is_built_in
from mha.implementations import Resolved
from mha.implementations.discovery import original_of, split_name
from mha.spec import CLAUSES, Implementation
from mha.spec.claims import DEVICES, DTYPES
from mha.spec.clauses import VERSIONS

# These find most by the second: the first six in wrong classes, the others among the faults that those miss.
FIRST = (
    *("HED-1", "MSK-2", "CFG-1", "MSK-8"),
    *("GRD-9", "STA-5", "XAT-1", "STA-4", "DRP-1", "STA-2", "CMP-4", "CAU-1", "EQV-8", "STA-7"),
)
DEFAULT_DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class Profile:
    """How far a run goes.

    boundary: the most boundary cases of a property; a few cover every level of every field and most pairs of levels,
        all of them cover every pair.
    examples: the random cases of each property, after the boundary cases.
    longest: the longest L and S of most properties; long_rows: of those about long rows.
    timeout: in seconds, of one clause under pytest-timeout, where no other is set; 0 for none.
    float64_every: in float64, one in so many of these cases is tried where float32 is judged in the same run: of the
        known faults, float32 finds what the others would (docs/bugfinding.md).
    ranks: the most ranks of a sharded implementation.
    slow: whether properties whose single case takes many seconds are tried.
    """

    boundary: int
    examples: int
    longest: int
    long_rows: int
    timeout: int
    float64_every: int = 1
    ranks: int = 2
    slow: bool = True


PROFILES = {
    "quick": Profile(18, 6, 33, 512, 300, float64_every=2, slow=False),
    "default": Profile(NO_LIMIT, 20, 260, 4096, 900, float64_every=2),
    "thorough": Profile(NO_LIMIT, 1000, 520, 65536, 0, ranks=4),
}


class Task(NamedTuple):
    """What one verdict is about, of an implementation."""

    clause: str
    dtype: str
    device: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is judged, and how thoroughly.

    profile: "quick", "default" or "thorough". seed: of the cases; the same seed gives the same cases and verdicts.
    clauses: ids, all that have a property if empty. dtypes, devices: names, as in torch.
    waivers: known failures, in addition to those of the built-in implementations. strict: a SHOULD counts as a MUST.
    contract: the version of the contract; clauses that came later are not judged.
    Raises ValueError for an unknown word, and for a device that is not available.

    >>> Settings(profile="quick", clauses=("MSK-1",)).limits.examples
    6
    """

    profile: str = "default"
    seed: int = 0
    clauses: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = DEFAULT_DTYPES
    devices: tuple[str, ...] = ("cpu",)
    waivers: tuple[Waiver, ...] = ()
    strict: bool = False
    contract: str = VERSIONS[-1]

    def __post_init__(self) -> None:
        """Raise ValueError, in one line, for settings that cannot be followed."""
        validate_choice("profile", [self.profile], PROFILES)
        validate_choice("clause", self.clauses, properties())
        for what, given in (("dtype", self.dtypes), ("device", self.devices)):
            if not given:
                raise ValueError(f"no {what} is named")
        validate_choice("dtype", self.dtypes, DTYPES)
        validate_devices(self.devices)

    @classmethod
    def of(  # noqa: PLR0913  the options of every front end
        cls,
        profile: str,
        seed: int,
        clauses: object,
        dtypes: object,
        devices: object,
        waivers: Iterable[Waiver] = (),
        *,
        strict: bool,
    ) -> Settings:
        """Return the settings for what users write: families and lists with commas, and dtypes of torch.

        The version of the contract is that of the current folder; see `pinned_contract`.
        """
        return cls(
            profile=profile,
            seed=seed,
            clauses=clauses_of(clauses),
            dtypes=names_of(dtypes),
            devices=names_of(devices),
            waivers=tuple(waivers),
            strict=strict,
            contract=pinned_contract(Path()),
        )

    def __str__(self) -> str:
        """Return what repeats the cases of a run, and the version of the contract if it is not the newest."""
        pinned = "" if self.contract == VERSIONS[-1] else f", contract {self.contract}"
        return f"profile {self.profile}, seed {self.seed}{pinned}"

    @property
    def limits(self) -> Profile:
        """How far the run goes."""
        return PROFILES[self.profile]

    @property
    def judged_clauses(self) -> tuple[str, ...]:
        """The clauses that are judged, in the order of the contract; any that are asked for are."""
        known = VERSIONS[: VERSIONS.index(self.contract) + 1]
        chosen = self.clauses or [clause for clause in properties() if CLAUSES[clause].since in known]
        return tuple(clause for clause in properties() if clause in chosen)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What is judged of each implementation, in order: that of the contract, but if all of it is, `FIRST` first."""
        first = FIRST if not self.clauses else ()
        clauses = sorted(self.judged_clauses, key=lambda x: first.index(x) if x in first else len(first))
        places = product(self.devices, self.dtypes)
        return tuple(Task(clause, dtype, device) for device, dtype in places for clause in clauses)

    def waivers_of(self, implementation: Implementation) -> tuple[Waiver, ...]:
        """Return the waivers that may apply to it: the built-in ones if this package ships it, then the user's."""
        original = original_of(implementation)
        of_ours = [waiver for waiver in built_in_waivers() if waiver.implementation == original.name]
        own = [replace(waiver, implementation=implementation.name) for waiver in of_ours if is_built_in(original)]
        return (*own, *self.waivers)


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
                f"unknown clause {word!r}{hint} (`mha spec` lists the clauses; the families are {', '.join(families)})"
            )
    return tuple(clause for clause in properties() for word in words if word in (clause, CLAUSES[clause].family))


def validate_choice(what: str, words: Collection[str], known: Collection[str]) -> None:
    """Raise ValueError unless every word is known."""
    for word in words:
        if word not in known:
            near = get_close_matches(word, known, n=3)
            hint = f"did you mean {' or '.join(near)}? Known: " if near else "known: "
            raise ValueError(f"unknown {what} {word!r}; {hint}{', '.join(known)}")


def validate_devices(devices: Collection[str]) -> None:
    """Raise ValueError unless every device is known and available."""
    validate_choice("device", devices, DEVICES)
    if "cuda" in devices and not torch.cuda.is_available():
        raise ValueError("the device 'cuda' was asked for, but torch finds no CUDA device here; judge on 'cpu'")


def by_name(resolved: Iterable[Resolved]) -> dict[str, Resolved]:
    """Return what was resolved by the implementations' names, or raise ValueError where two share one.

    One implementation may be given twice; the first target counts.
    """
    named: dict[str, Resolved] = {}
    for each in resolved:
        name = each.implementation.name
        first = named.setdefault(name, each)
        if first.implementation is not each.implementation and first.target != each.target:
            _, target = split_name(each.target)
            raise ValueError(f"two implementations are named {name!r}; name one differently: NAME={target}")
    return named
