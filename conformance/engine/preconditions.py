"""Why a failure does not count: a plain call fails too, or the contract allows the refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from mha.conformance.cases.case import Case
from mha.conformance.cases.claimed import fit_sizes, sorted_biases
from mha.conformance.cases.domain import CLAIMED_INPUTS
from mha.conformance.harness.assertions import expect_close
from mha.conformance.harness.errors import CALL, AdapterError, CallRaised, Discard, Violation
from mha.conformance.harness.recording import CallStep
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import Property, PropertyFunction, properties
from mha.conformance.sharding.group import RankError
from mha.implementations.process.torch_state import preserved
from mha.spec import Claims, Implementation
from mha.spec.problem import INPUTS

BASIC = ("SHP-1", "HED-1")
MAY_REFUSE = "the call with a causal flag and L != S is refused, which CAU-3 allows"
LAYOUT_REFUSED = "the call with inputs that are not contiguous is refused, which SHP-7 allows"
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
        norm_weights=claims.norm_weights,
    )
    if claims.always_causal and claims.causal:
        plain = replace(plain, causal=True, alignment=claims.causal)
    return [replace(plain, bias=bias) for bias in sorted_biases(claims)]


def _try(implementation: Implementation, dtype: str, device: str) -> FailedPrecondition | None:
    """Return SHP-1 where a plain call raises or has the wrong shape, HED-1 for incorrect values."""
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
            if violation.family:
                return None
            return FailedPrecondition("HED-1", f"a plain call fails HED-1: {message}")
    return None


def failed_layout(
    implementation: Implementation, prop: Property, case: Case
) -> FailedPrecondition | None:
    """Return SHP-7 where only the layout of the inputs makes a case fail, and SHP-7 fails too."""
    if prop.clause == "SHP-7" or case.layout in NOT_COMPARED:
        return None
    layout_matters = properties()["SHP-7"][0].function
    contiguous = replace(case, layout="contiguous")
    if (
        _fails(implementation, layout_matters, case) is True
        and _fails(implementation, prop.function, contiguous) is False
        and _fails(implementation, prop.function, case) is True
    ):
        return FailedPrecondition("SHP-7", "it passes where the same inputs are contiguous")
    return None


def allowed_refusal(session: Session, prop: Property, violation: Violation) -> str:
    """Return why a violation is a refusal that the contract allows, empty if it is none.

    CAU-3 allows it for a causal call with L != S, and SHP-7 for inputs that are not contiguous, if
    the same call with contiguous inputs does not raise.
    """
    if not isinstance(violation, CallRaised) or violation.what != CALL:
        return ""
    if isinstance(violation.error, RankError):  # not by every rank
        return ""
    case = session.case
    if prop.may_refuse and case.causal and case.L != case.S:
        return MAY_REFUSE
    if prop.clause != "SHP-7" and _refuses_layout(session):
        return LAYOUT_REFUSED
    return ""


def _refuses_layout(session: Session) -> bool:
    """Return whether the last call raised, and returns with contiguous copies of its inputs."""
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
