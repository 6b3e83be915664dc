"""DRP-2 for dropout of the output, after its projection."""

from __future__ import annotations

from dataclasses import replace

from mha.conformance.cases.case import Case
from mha.conformance.harness.session import Session
from mha.conformance.properties.dropout import (
    DRAWN,
    LONGEST,
    PROBABILITIES,
    dropping,
    expect_share,
    expect_zero_or_rescaled,
)
from mha.conformance.properties.registry import property_of


@property_of("DRP-2", DRAWN, needs="dropout=output", must_reject=("zeros", "noise"), max_cases=12, number=3)
def each_output_is_dropped_alone_or_rescaled(session: Session, case: Case) -> None:
    for dropout in PROBABILITIES:
        _expect_outputs_dropped(session, case, 65 if case.seed % 2 else 17, dropout)


@property_of(
    "DRP-2",
    replace(DRAWN, masks=("none",), causal=(False,), max_B=1, max_heads=1),
    needs="dropout=output",
    max_cases=1,
    number=4,
)
def the_share_of_outputs_that_is_dropped_is_p(session: Session, case: Case) -> None:
    for dropout in PROBABILITIES:
        _expect_outputs_dropped(session, case, LONGEST, dropout)


def _expect_outputs_dropped(session: Session, case: Case, length: int, dropout: float) -> None:
    """Each of L outputs of a width of at least L is 0 with probability p, alone, and rescaled otherwise."""
    problem = dropping(replace(case, L=length, S=length, head_dim=length).problem(), dropout)
    seen, answer = session(problem, seed=case.seed).output, session.expected(problem).output
    for item in range(case.B):
        own, right = seen[item], answer[item]
        expect_zero_or_rescaled(session, own, right, dropout, "the output in column")
        expect_share(own, right.mid != 0, dropout, ("rows", "columns"))
