"""The registry of properties: which function tests which clause, on which cases."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pkgutil import iter_modules

from mha.conformance.cases.boundary import NO_LIMIT
from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import Domain
from mha.conformance.cases.reasons import NeedsClaim, NotApplicable, OtherDtypes, Reason
from mha.conformance.harness.session import Session
from mha.implementations.discovery.importing import LOADERS
from mha.implementations.discovery.originals import watch
from mha.spec import CLAUSES, Claims, Level

PropertyFunction = Callable[[Session, Case], None]
# A property that needs one of these builds what no property of another family has tried before it.
VARIANTS = (
    "extras",
    "grouped_query",
    "kv_widths",
    "value_width",
    "own_head_dim",
    "decodes",
    "composes",
    "world_sizes",
)
_registered: dict[tuple[str, int], Property] = {}

# Needs of what a rotation by positions makes untrue, ...
NO_POSITIONS = ("rotary=None",)
# ... and of what either a rotation or a norm does.
UNCHANGED_HEADS = (*NO_POSITIONS, "qk_norm=None")


@dataclass(frozen=True, kw_only=True)
class Property:
    """A function that raises a `Violation` unless the implementation keeps a clause on a case.

    number: among the properties of the clause. It orders them and seeds their cases, so that no
        case changes with the function's name or its module.
    level: that of the clause, unless the property tests a recommendation only.
    domain: the cases it takes.
    module: the name of the module that defines it.
    needs: the claims it needs, in addition to those of its domain: "field", or "field|other" where
        one of them will do, or "field=value" where several values are possible, or
        "field=one|other" where one of these will do.
    requires: the basic clause that must hold for the property to mean anything (see
        `engine.preconditions`).
    must_reject: the known-bad answers of `harness.known_bad` that it must reject, in at least the
        share `min_rejection_rate` of the cases in which they are wrong.
    within_bounds: whether it is about errors within the bounds, so that known-bad answers need not
        be wrong by more than these.
    reads_empty_rows: whether outputs of rows without an allowed key count for it: elsewhere, a
        known-bad answer that is wrong in these only is right.
    max_cases: the most boundary cases, and one more than the most random ones, of a property that
        takes long.
    may_refuse: whether an implementation may refuse a causal call with L != S here, as CAU-3
        allows.
    slow: whether a case takes so long that the quick profile tries none.
    """

    name: str
    clause: str
    number: int
    level: Level
    domain: Domain
    function: PropertyFunction
    module: str
    needs: tuple[str, ...]
    requires: str | None
    must_reject: tuple[str, ...]
    min_rejection_rate: float
    within_bounds: bool
    reads_empty_rows: bool
    max_cases: int
    may_refuse: bool
    slow: bool

    def within(self, claims: Claims, dtype: str) -> Domain | Reason:
        """Return the domain cut down to what is claimed, or why no case is left."""
        for need in self.needs:
            if is_claimed(claims, need):
                continue
            return _reason_of(claims, NeedsClaim.of(need))
        if self.domain.dtypes and dtype not in self.domain.dtypes:
            return OtherDtypes(self.domain.dtypes)
        return self.domain.within(claims)

    @property
    def builds_a_variant(self) -> bool:
        """Whether it builds what no property of another family has tried."""
        return any(
            need.partition("=")[0] in VARIANTS and not need.endswith("=False")
            for need in self.needs
        )


def _reason_of(claims: Claims, missing: NeedsClaim) -> Reason:
    """Return why a property is not judged whose need is not met."""
    claimed = _claimed(claims, missing.field)
    if missing.value == "False" and claimed is True:
        return NotApplicable(f"does not apply: {missing.field} is claimed")
    if "None" in missing.value.split("|"):
        # What some other values of a claim make untrue
        said = f"={claimed!r}" if isinstance(claimed, str) else ""
        text = f"does not apply: {missing.field}{said} is claimed"
        return NotApplicable(text, missing.topic)
    return missing


def _claimed(claims: Claims, field: str) -> object:
    """Return what is claimed of a field, as in "scores.window"; None of a claim not made."""
    claimed: object = claims
    for part in field.split("."):
        claimed = getattr(claimed, part, None)
    return claimed


def is_claimed(claims: Claims, need: str) -> bool:
    """Return whether the claims meet a need of a property.

    >>> is_claimed(Claims(composes={"compile"}), "composes=compile")
    True
    >>> is_claimed(Claims(), "dropout"), is_claimed(Claims(), "dropout|cross_attention")
    (False, True)
    """
    alternatives, _, values = need.partition("=")
    if not values:
        return any(_claimed(claims, field) for field in alternatives.split("|"))
    claimed = _claimed(claims, alternatives)
    made = claimed if isinstance(claimed, frozenset) else (claimed,)
    wanted = values.split("|")
    return any(str(value) in wanted for value in made)


def property_of(  # noqa: PLR0913  the fields of a property, each by name
    clause: str,
    domain: Domain | None = None,
    *,
    number: int = 1,
    needs: str | tuple[str, ...] = (),
    level: Level | None = None,
    requires: str | None = "SHP-1",
    must_reject: tuple[str, ...] = ("lopsided",),
    min_rejection_rate: float = 0.9,
    within_bounds: bool = False,
    reads_empty_rows: bool = True,
    max_cases: int = NO_LIMIT,
    may_refuse: bool = True,
    slow: bool = False,
) -> Callable[[PropertyFunction], PropertyFunction]:
    """Register a function as a property of a clause; see `Property`."""
    assert clause in CLAUSES, f"the contract has no clause {clause}"

    def register(function: PropertyFunction) -> PropertyFunction:
        new = Property(
            name=function.__name__,
            clause=clause,
            number=number,
            level=level or CLAUSES[clause].level,
            domain=domain or Domain(),
            function=function,
            module=function.__module__.rpartition(".")[2],
            needs=(needs,) if isinstance(needs, str) else needs,
            requires=None if CLAUSES[clause].family in ("CFG", "SHP") else requires,
            must_reject=must_reject,
            min_rejection_rate=min_rejection_rate,
            within_bounds=within_bounds,
            reads_empty_rows=reads_empty_rows,
            max_cases=max_cases,
            may_refuse=may_refuse,
            slow=slow,
        )
        known = _registered.setdefault((clause, number), new)
        assert known.name == new.name, (
            f"{clause} already has a property number {number}: {known.name}"
        )
        return function

    return register


def needs_ranks(clause: str) -> bool:
    """Return whether every property of a clause runs on ranks.

    >>> needs_ranks("DST-1"), needs_ranks("SHP-1")
    (True, False)
    """
    return all("world_sizes" in prop.needs for prop in properties()[clause])


@cache
def properties() -> dict[str, tuple[Property, ...]]:
    """Return the properties of each clause, in the order of the contract and of their numbers."""
    for module in iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"mha.conformance.properties.{module.name}")
    judged: dict[str, tuple[Property, ...]] = {}
    for clause in CLAUSES:
        numbers = sorted(number for of, number in _registered if of == clause)
        if numbers:
            judged[clause] = tuple(_registered[clause, number] for number in numbers)
    watch("mha.conformance.properties", judged)
    for prop in _registered.values():
        watch(f"the property {prop.name}", vars(prop))
    return judged


LOADERS.append(properties)
