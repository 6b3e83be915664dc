"""NUM-8: in half precision, the size of an output's error beside what its roundings explain."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.harness.assertions import assume, expect
from mha.conformance.harness.oracle_answers import kept
from mha.conformance.harness.session import Session
from mha.conformance.properties.directed import (
    MANY_ITEMS,
    MANY_ROWS,
    PLAIN_ROWS,
    with_long_rows,
)
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.directed_errors import assume_modelled
from mha.spec import Claims, Problem
from mha.spec.directed import LARGEST_DEVIATION
from mha.spec.energy import explained_norm
from mha.spec.rounding_graph import rounding_graph

# How many times what roundings explain is more than advice.
FAR = 2
# As many keys as a long context has, in a call that takes a second.
FEW_QUERIES, MOST_KEYS = 8, 16384


@property_of(
    "NUM-8",
    replace(
        MANY_ROWS,
        sizes={
            "n_heads": (8, 4),
            "head_dim": (16, 64),
            "B": (MANY_ITEMS,),
            "L": (33, 17),
            "S": (33, 17),
        },
    ),
    requires="HED-1",
    must_reject=("lopsided",),
    max_cases=2,
)
def errors_are_as_large_as_roundings_explain(session: Session, case: Case) -> None:
    """In half precision independent roundings of stored numbers explain the energy of the error."""
    _expect_energy_of_rounding(session, case)


@property_of(
    "NUM-8", PLAIN_ROWS, requires="HED-1", must_reject=("lopsided",), max_cases=1, number=2
)
def errors_for_many_keys_are_as_large_as_roundings_explain(session: Session, case: Case) -> None:
    """In half precision the energy of the error is what roundings explain, for 4096 keys."""
    _expect_energy_of_rounding(session, with_long_rows(case))


@property_of(
    "NUM-8",
    PLAIN_ROWS,
    requires="HED-1",
    level="MUST",
    must_reject=("lopsided",),
    max_cases=1,
    number=3,
)
def errors_for_many_keys_are_not_twice_what_roundings_explain(session: Session, case: Case) -> None:
    """In half precision the error of 4096 keys has at most twice the energy of roundings."""
    _expect_energy_of_rounding(session, with_long_rows(case), FAR)


@property_of(
    "NUM-8",
    PLAIN_ROWS,
    requires="HED-1",
    level="MUST",
    must_reject=("lopsided",),
    max_cases=1,
    number=4,
)
def errors_for_very_many_keys_are_not_twice_what_roundings_explain(
    session: Session, case: Case
) -> None:
    """In half precision the error of 16384 keys has at most twice the energy of roundings."""
    longest = replace(case, B=1, n_heads=1, head_dim=64, L=FEW_QUERIES, S=MOST_KEYS)
    _expect_energy_of_rounding(session, longest, FAR)


def _expect_energy_of_rounding(session: Session, case: Case, times: int = 1) -> None:
    """Expect the norm of the error to be at most so many times what rounding explains."""
    assume_modelled(session, case)
    flushes = session.claims.rounding.flushes
    assume(
        not flushes, "Rounding.flushes is declared: what is flushed adds up, and roundings do not"
    )
    problem = case.problem()
    output, exact = session(problem).output, _exact_output(case, problem, session.claims)
    assume(exact.deviation <= LARGEST_DEVIATION, "the first order of the roundings says too little")
    session.scripted = False  # a sum over all places takes the judge
    error = (output.tensor.detach().double() - exact.output).masked_fill(~exact.known, 0.0)
    found, explained, size = float(error.norm()), exact.explained, float(exact.output.norm())
    message = (
        f"{output.code} is off by {found / size:.2%} of its norm; rounding explains"
        f" {explained / size:.2%} at most"
    )
    expect(found <= times * explained, message)
    output.note_margin(found / explained / times)


@dataclass(frozen=True, eq=False)
class _Exact:
    """The exact output, its known rows, the norm that rounding explains, and max_j W_j."""

    output: Tensor
    known: Tensor
    explained: float
    deviation: float


def _exact_output(case: Case, problem: Problem, claims: Claims) -> _Exact:
    """Solve a problem, and bound the norm of what rounding does to its output."""

    def solve() -> _Exact:
        graph = rounding_graph(problem, claims)
        deviation = math.sqrt(float(graph.variance.max()))
        return _Exact(graph.output, graph.known, explained_norm(graph, case.generator), deviation)

    return kept.answer(problem, ("energy", claims, case), problem.query.numel(), solve)
