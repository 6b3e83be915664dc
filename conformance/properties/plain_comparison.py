"""The plain formula in the same dtype, than which half precision must not be much worse."""

from __future__ import annotations

from mha.conformance.cases.case import Case
from mha.conformance.cases.reference import plain_formula
from mha.conformance.harness.assertions import expect_no_worse
from mha.conformance.harness.session import Session


def expect_no_worse_than_plain(session: Session, case: Case) -> None:
    """The root mean square error of the output is at most twice that of the plain formula in the same dtype."""
    problem = case.problem()
    expected, output = session.expected(problem), session(problem).output
    filled = (~expected.empty).all(1)
    plain = plain_formula(problem, problem.allowed(session.claims.causal))
    expect_no_worse(output.code, output.tensor[filled], plain[filled], expected.output.mid[filled])
