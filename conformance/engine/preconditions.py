"""The basic clauses: where a plain call fails, what the clauses that depend on it would say is no news."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from mha.conformance.cases.case import Case
from mha.conformance.harness.assertions import expect_close
from mha.conformance.harness.errors import CallRaised, Violation
from mha.conformance.harness.session import Session
from mha.spec import Claims, Implementation

BASIC = ("SHP-1", "HED-1")


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


def plain_cases(claims: Claims, dtype: str, device: str) -> list[Case]:
    """Return the plainest cases that are no special case: one for each claimed `Config.bias`."""
    inputs, keys = ("cross", 5) if claims.cross_attention else ("self", 3)
    plain = Case(n_heads=2, head_dim=3, B=2, L=3, S=keys, dtype=dtype, device=device, inputs=inputs, seed=1)
    if claims.always_causal and claims.causal:
        plain = replace(plain, causal=True, alignment=claims.causal)
    return [replace(plain, bias=bias) for bias in sorted(claims.bias, reverse=True)]


def _try(implementation: Implementation, dtype: str, device: str) -> Fault | None:
    for case in plain_cases(implementation.claims, dtype, device):
        trial = Session(implementation, case)
        try:
            problem = case.problem()
            expect_close(trial(problem).output, trial.expected(problem).output, because="the loop over heads")
        except Violation as violation:
            told = f"{violation.message}, in the plain case {case!r}"
            if isinstance(violation, CallRaised) or violation.family == "SHP":
                return Fault("SHP-1", told)
            return None if violation.family else Fault("HED-1", told)
    return None
