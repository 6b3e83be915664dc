"""The registry of properties: which function tests which clause, on which cases, under which claims."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import Domain
from mha.conformance.trial import Trial
from mha.spec import CLAUSES, Claims

# One module for each family of the contract, in its order.
MODULES = ("configuration", "shapes", "softmax", "masks", "empty_rows", "causal", "heads", "symmetries", "accuracy")
Check = Callable[[Trial, Case], None]
_registered: list[Property] = []


@dataclass(frozen=True)
class Property:
    """A function that raises a Violation unless a trial of a case keeps a clause.

    clause: id of the clause. domain: the cases that it is about. module: the name of the module that has it.
    needs: a field of `Claims` that must not be false or empty, besides what the domain needs.
    """

    name: str
    clause: str
    domain: Domain
    check: Check
    module: str
    needs: str | None = None

    def within(self, claims: Claims, dtype: str) -> Domain | str:
        """Return the cases that the claims leave, or why there are none."""
        if self.needs and not getattr(claims, self.needs):
            return f"needs the claim {self.needs}"
        if self.domain.dtypes and dtype not in self.domain.dtypes:
            return f"is only about {', '.join(self.domain.dtypes)}"
        return self.domain.within(claims)


def checks(clause: str, domain: Domain | None = None, *, needs: str | None = None) -> Callable[[Check], Check]:
    """Register a function as a property of a clause; `needs` names a claim that must hold."""
    assert clause in CLAUSES, f"{clause} is no clause of the contract"

    def register(check: Check) -> Check:
        module = check.__module__.rpartition(".")[2]
        _registered.append(Property(check.__name__, clause, domain or Domain(), check, module, needs))
        return check

    return register


@cache
def properties() -> dict[str, tuple[Property, ...]]:
    """Return the properties of each clause that has one, in the order of the contract."""
    for module in MODULES:
        importlib.import_module(f"mha.conformance.properties.{module}")
    found = {clause: tuple(p for p in _registered if p.clause == clause) for clause in CLAUSES}
    return {clause: members for clause, members in found.items() if members}
