"""What blocks a clause: a plain call that fails, and a failure that only the memory layout of the
inputs causes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from mha.conformance.cases.case import Case
from mha.conformance.cases.claimed import fit_sizes, sorted_biases
from mha.conformance.cases.domain import CLAIMED_INPUTS
from mha.conformance.harness.assertions import expect_close
from mha.conformance.harness.errors import AdapterError, CallRaised, Discard, Violation
from mha.conformance.harness.recording import CallStep
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import Property, PropertyFunction, properties
from mha.implementations.process.torch_state import preserved
from mha.spec import Claims, Implementation
from mha.spec.problem import INPUTS

BASIC = ("SHP-1", "HED-1")
# Contiguous already, or with other numbers than the contiguous case.
NOT_COMPARED = ("contiguous", "expanded", "repeated")


class FailedPrecondition(NamedTuple):
    """A clause that explains why another one fails, and how that is known."""

    clause: str
    message: str


# Keyed by identity, as an implementation need not be hashable; it is kept alive so that its id is
# not used again.
_known: dict[tuple[int, str, str], tuple[Implementation, FailedPrecondition | None]] = {}


def failed_precondition(
    implementation: Implementation, prop: Property, dtype: str, device: str
) -> FailedPrecondition | None:
    """Return the basic clause whose failure makes a property meaningless, if one fails."""
    if not prop.requires:
        return None
    key = id(implementation), dtype, device
    if key not in _known:
        _known[key] = implementation, _try(implementation, dtype, device)
    failed = _known[key][1]
    return failed if failed and failed.clause in ("SHP-1", prop.requires) else None


def plain_cases(claims: Claims, dtype: str, device: str) -> list[Case]:
    """Return the plainest cases without a special size: one for each claimed `Config.bias`."""
    inputs = CLAIMED_INPUTS[claims.cross_attention][0]
    sizes = {"n_heads": 2, "head_dim": 3, "L": 3, "S": 3 if inputs == "self" else 5}
    plain = Case(
        **fit_sizes(sizes, claims),
        B=2,
        dtype=dtype,
        device=device,
        inputs=inputs,
        seed=1,
        projected=claims.projections,
    )
    if claims.always_causal and claims.causal:
        plain = replace(plain, causal=True, alignment=claims.causal)
    return [replace(plain, bias=bias) for bias in sorted_biases(claims)]


def _try(implementation: Implementation, dtype: str, device: str) -> FailedPrecondition | None:
    """Return SHP-1 where a plain call raises or has the wrong shape, HED-1 where its values are
    incorrect.
    """
    for case in plain_cases(implementation.claims, dtype, device):
        try:
            with preserved():
                session, problem = Session(implementation, case), case.problem()
                expect_close(
                    session(problem).output,
                    session.expected(problem).output,
                    because="the loop over heads",
                )
        except Violation as violation:
            message = f"{violation.message}, in the plain case {case!r}"
            if isinstance(violation, CallRaised) or violation.family == "SHP":
                return FailedPrecondition("SHP-1", f"a plain call fails SHP-1: {message}")
            return (
                None
                if violation.family
                else FailedPrecondition("HED-1", f"a plain call fails HED-1: {message}")
            )
    return None


def failed_layout(
    implementation: Implementation, prop: Property, case: Case
) -> FailedPrecondition | None:
    """Return SHP-7 where the layout of the inputs alone makes a property fail in a case, and SHP-7
    fails in it too.
    """
    if prop.clause == "SHP-7" or case.layout in NOT_COMPARED:
        return None
    layout_matters, contiguous = (
        properties()["SHP-7"][0].function,
        replace(case, layout="contiguous"),
    )
    tried = ((layout_matters, case), (prop.function, contiguous), (prop.function, case))
    if [_fails(implementation, function, each) for function, each in tried] != [True, False, True]:
        return None
    return FailedPrecondition("SHP-7", "it passes where the same inputs are contiguous")


def refuses_layout(session: Session) -> bool:
    """Return whether the layout of the inputs alone made the last call raise: with contiguous
    copies it returns.
    """
    last = session.steps[-1]
    if not isinstance(last, CallStep):
        return False
    inputs = (getattr(last.problem, name) for name in INPUTS)
    if all(tensor.is_contiguous() for tensor in inputs):
        return False
    dense = last.problem.map_inputs(lambda x: x.contiguous())
    try:
        with preserved():
            Session(session.implementation, session.case)(
                dense, need_weights=last.need_weights, mode=last.mode
            )
    except (Violation, Discard, AdapterError):
        return False
    return True


def _fails(implementation: Implementation, function: PropertyFunction, case: Case) -> bool | None:
    """Return whether a property fails in a case; None where that is not known."""
    try:
        with preserved():
            function(Session(implementation, case), case)
    except Violation:
        return True
    except Exception:  # of the adapter or the judge, or a case that is discarded
        return None
    return False
