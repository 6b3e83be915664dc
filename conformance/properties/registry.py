"""The registry of properties: which function tests which clause, on which cases, under which claims."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pkgutil import iter_modules

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import Domain
from mha.conformance.harness.session import Session
from mha.spec import CLAUSES, Claims, Level

PropertyFunction = Callable[[Session, Case], None]
_registered: dict[tuple[str, int], Property] = {}


@dataclass(frozen=True, kw_only=True)
class Property:
    """A function that raises a Violation unless a trial of a case keeps a clause.

    clause: id of the clause. number: of the property among those of its clause: it orders and seeds them, so that
    neither a new name nor another module changes a case. level: of what is tested, where it is not the clause's own.
    domain: the cases that it is about. module: the name of the module that has it. needs: a field of `Claims`, or a
    word "field:word" in one, that must be claimed besides what the domain needs. after: the basic clause without which
    this one tells nothing. rejects: the known wrong answers, of `harness.known_bad`, that it exists to reject, in
    at least a share `floor` of the cases. limit: the most boundary cases, and one more than the most drawn ones, of a
    property that takes long.
    """

    name: str
    clause: str
    number: int
    level: Level
    domain: Domain
    check: PropertyFunction
    module: str
    needs: str | None
    requires: str | None
    must_reject: tuple[str, ...]
    min_rejection_rate: float
    max_cases: int

    def within(self, claims: Claims, dtype: str) -> Domain | str:
        """Return the cases that the claims leave, or why there are none."""
        if self.needs:
            field, _, word = self.needs.partition(":")
            claimed = getattr(claims, field)
            if (word not in claimed) if word else not claimed:
                return f"needs the claim {self.needs.replace(':', '=')}"
        if self.domain.dtypes and dtype not in self.domain.dtypes:
            return f"is only about {', '.join(self.domain.dtypes)}"
        return self.domain.within(claims)


def property_of(
    clause: str,
    domain: Domain | None = None,
    *,
    number: int = 1,
    needs: str | None = None,
    level: Level | None = None,
    requires: str | None = "SHP-1",
    must_reject: tuple[str, ...] = ("noise",),
    min_rejection_rate: float = 0.5,
    max_cases: int = 1 << 16,
) -> Callable[[PropertyFunction], PropertyFunction]:
    """Register a function as a property of a clause; see `Property`."""
    assert clause in CLAUSES, f"{clause} is no clause of the contract"
    known = CLAUSES[clause]

    def register(check: PropertyFunction) -> PropertyFunction:
        found = Property(
            name=check.__name__,
            clause=clause,
            number=number,
            level=level or known.level,
            domain=domain or Domain(),
            check=check,
            module=check.__module__.rpartition(".")[2],
            needs=needs,
            requires=None if known.family in ("CFG", "SHP") else requires,
            must_reject=must_reject,
            min_rejection_rate=min_rejection_rate,
            max_cases=max_cases,
        )
        known_as = _registered.setdefault((clause, number), found).name
        assert known_as == found.name, f"{clause} has a property {number} already: {known_as}"
        return check

    return register


@cache
def properties() -> dict[str, tuple[Property, ...]]:
    """Return the properties of each clause that has one, in the order of the contract."""
    for module in iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"mha.conformance.properties.{module.name}")
    ordered = [_registered[key] for key in sorted(_registered)]
    found = {clause: tuple(prop for prop in ordered if prop.clause == clause) for clause in CLAUSES}
    return {clause: members for clause, members in found.items() if members}
