"""What a fault is, and the decorator that declares one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import nn

from mha.conformance.faults.base import implementation_of
from mha.spec import CLAUSES, Claims, Implementation

# Every fault that has been declared, in the order in which the modules were imported; see
# `registry.FAULTS`.
declared: list[Fault] = []
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A faulty class, and a clause that must catch it in a dtype.

    caught_by: the property that must catch it, if the clause has several and not any of them will
        do.
    script_shows: whether the script of the failure fails on its own. The script repeats the calls;
        it cannot show what is measured by other means.
    """

    cls: type[nn.Module]
    implementation: Implementation
    clause: str
    dtype: str
    caught_by: str
    script_shows: bool

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.cls.__name__

    @property
    def defect(self) -> str:
        """The defect in one line: the docstring of the class."""
        return inspect.cleandoc(vars(self.cls)["__doc__"]).replace("\n", " ")

    @property
    def trigger(self) -> str:
        """The only condition under which the defect shows, or "" if most inputs show the defect."""
        return str(vars(self.cls).get("trigger", ""))

    @property
    def source(self) -> str:
        """The address where such a fault was reported, or ""."""
        return str(vars(self.cls).get("source", ""))


def fault(  # noqa: PLR0913  the fields of a declaration, by name
    clause: str,
    *,
    dtype: str = "float32",
    caught_by: str = "",
    claims: Claims | None = None,
    script_shows: bool = True,
    trigger: str = "",
    source: str = "",
    implementation: Implementation | None = None,
) -> Callable[[type[Module]], type[Module]]:
    """Declare that a clause must catch a class; once for each clause, dtype or property that must.

    dtype, caught_by, script_shows, trigger, source: see `Fault`; trigger and source are given once
        for a class.
    claims: those of the base class by default.
    implementation: made of the class by default; it is also `faulty_<class>` in the module of the
        class, from where the script of a failure imports it.
    """
    assert clause in CLAUSES, f"{clause} is not a clause of the contract"
    cell = partial(
        Fault, clause=clause, dtype=dtype, caught_by=caught_by, script_shows=script_shows
    )
    about = {"trigger": trigger, "source": source}
    return partial(_declare, cell, about, claims, implementation)


def _declare(
    cell: Callable[..., Fault],
    about: dict[str, str],
    claims: Claims | None,
    implementation: Implementation | None,
    cls: type[Module],
) -> type[Module]:
    """Add a cell of a class, with the implementation that the decorators of the class share."""
    module, name = sys.modules[cls.__module__], f"faulty_{cls.__name__}"
    if not hasattr(module, name):
        setattr(module, name, implementation or implementation_of(cls, claims))
    shared: Implementation = getattr(module, name)
    assert claims in (None, shared.claims), f"{cls.__name__} has two claims"
    for attribute, text in about.items():
        if text:
            setattr(cls, attribute, text)
    declared.append(cell(cls=cls, implementation=shared))
    return cls
