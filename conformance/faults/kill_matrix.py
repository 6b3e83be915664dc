"""The kill matrix: what each clause, and each baseline check, reports for each fault."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from mha.conformance.cases.parsing import read_case
from mha.conformance.engine.judge import judge
from mha.conformance.faults.baselines import caught_by
from mha.conformance.faults.fault import Fault
from mha.conformance.faults.registry import FAULTS
from mha.conformance.properties.registry import properties
from mha.conformance.settings import Settings
from mha.conformance.sharding.gathered import on_ranks
from mha.implementations import Resolved

CAUGHT = ("fail", "refused")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One cell of the matrix: a fault in a dtype, and a clause.

    defect, trigger, source: see `mha.conformance.faults.fault.Fault`.
    named: whether the clause must catch the fault.
    baselines: the baseline checks that fail for the fault (see `mha.conformance.faults.baselines`).
    cases_to_failure: the number of cases up to the first failure.
    minimal_case_elements: how many numbers the query, key and value of `case` have.
    case: the case that the failure was shrunk to, as code.
    """

    fault: str
    defect: str
    trigger: str
    source: str
    baselines: tuple[str, ...]
    clause: str
    dtype: str
    seed: int
    named: bool
    status: str
    cases_to_failure: int | None
    minimal_case_elements: int | None
    case: str | None

    @property
    def caught(self) -> bool:
        """Whether the clause fails for the fault."""
        return self.status in CAUGHT


def kills(
    seed: int, profile: str, *, every_clause: bool, names: Collection[str] = ()
) -> Iterator[Kill]:
    """Judge the named faults, or all, by the clauses that must catch them, or by every clause.

    Each fault, dtype and clause is one cell, even where several properties of the clause must catch
    the fault.
    """
    cells: dict[tuple[str, str], list[Fault]] = {}
    for fault in FAULTS:
        if not names or fault.name in names:
            cells.setdefault((fault.name, fault.dtype), []).append(fault)
    for (_, dtype), members in cells.items():
        named = {fault.clause for fault in members}
        settings = Settings(profile=profile, seed=seed, dtypes=(dtype,), strict=True)
        baselines = caught_by(on_ranks(members[0].implementation, 2), dtype)
        for clause in (clause for clause in properties() if every_clause or clause in named):
            yield _kill(members[0], clause, settings, named=clause in named, baselines=baselines)


def _kill(
    fault: Fault, clause: str, settings: Settings, *, named: bool, baselines: tuple[str, ...]
) -> Kill:
    """Judge one cell."""
    verdict = judge(
        Resolved(fault.implementation, ""), clause, fault.dtype, "cpu", settings, diagnosed=False
    )
    return Kill(
        fault=fault.name,
        defect=fault.defect,
        trigger=fault.trigger,
        source=fault.source,
        baselines=baselines,
        clause=clause,
        dtype=fault.dtype,
        seed=settings.seed,
        named=named,
        status="blocked" if verdict.blocked_by else verdict.status,
        cases_to_failure=verdict.cases_to_failure,
        minimal_case_elements=elements(verdict.case) if verdict.case else None,
        case=verdict.case,
    )


def elements(code: str) -> int:
    """Return how many numbers the query, key and value of a case have."""
    case = read_case(code)
    return case.B * case.n_heads * case.head_dim * (case.L + 2 * case.S)
