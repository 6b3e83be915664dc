"""The basic clauses: where a plain call fails, what the clauses that depend on it would say is no news."""

from __future__ import annotations

from typing import NamedTuple

from mha.conformance.cases.case import Case
from mha.conformance.expect import expect_close
from mha.conformance.trial import Trial
from mha.conformance.violation import Refusal, Violation
from mha.spec import Implementation


class Fault(NamedTuple):
    """A basic clause that fails, and what was seen."""

    clause: str
    message: str


# By identity: an implementation need not be hashable; it is kept beside, so that no other can have its id.
_known: dict[tuple[int, str, str], tuple[Implementation, Fault | None]] = {}


def plain_fault(implementation: Implementation, dtype: str, device: str) -> Fault | None:
    """Return the basic clause that the plainest cases violate, if they violate one: SHP-1, or HED-1 for the value."""
    key = id(implementation), dtype, device
    if key not in _known:
        _known[key] = implementation, _try(implementation, dtype, device)
    return _known[key][1]


def _try(implementation: Implementation, dtype: str, device: str) -> Fault | None:
    claims = implementation.claims
    inputs, keys = ("cross", 5) if claims.cross_attention else ("self", 3)
    for bias in sorted(claims.bias, reverse=True):
        case = Case(
            n_heads=2, head_dim=3, bias=bias, B=2, L=3, S=keys, dtype=dtype, device=device, inputs=inputs, seed=1
        )
        trial = Trial(implementation, case)
        try:
            problem = case.problem()
            expect_close(trial(problem).output, trial.answer(problem).output, because="the loop over heads")
        except Violation as violation:
            basic = isinstance(violation, Refusal) or violation.family
            return Fault("SHP-1" if basic else "HED-1", f"{violation.message}, in the plain case {case!r}")
    return None
