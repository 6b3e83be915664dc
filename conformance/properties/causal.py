"""CAU: causal calls."""

from __future__ import annotations

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import DENSE, MODERATE, WIDE_RANGE, WITH_GRADIENT, Domain
from mha.conformance.cases.mask_kinds import BOOLEAN, FLOAT
from mha.conformance.cases.transforms import as_claimed
from mha.conformance.harness.assertions import expect_agree, expect_close, expect_equal
from mha.conformance.harness.errors import CallRaised
from mha.conformance.harness.recording import RecordedTensor
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.unread_keys import expect_unread
from mha.spec import Problem, causal_mask, join_causal
from mha.spec.problem import INPUTS

CAUSAL = (True,)


def _causal_mask(session: Session, problem: Problem) -> torch.Tensor:
    """Return the boolean (L, S) mask of the claimed alignment."""
    alignment = session.claims.causal
    assert alignment is not None
    return causal_mask(
        problem.query.shape[1], problem.key.shape[1], alignment, problem.query.device
    )


@property_of(
    "CAU-1",
    Domain(masks=("none", *BOOLEAN), causal=CAUSAL, square=True, min_L=2, min_S=2, layouts=DENSE),
    must_reject=("unmasked", "lopsided"),
)
def later_positions_have_no_influence(session: Session, case: Case) -> None:
    """Changing position j changes no output at i < j."""
    problem = case.problem()
    later = (~_causal_mask(session, problem)).expand(case.B, -1, -1)
    expect_unread(session, problem, later, case.generator, "which come after")


@property_of(
    "CAU-1",
    Domain(
        causal=CAUSAL,
        square=True,
        min_L=2,
        min_S=2,
        layouts=DENSE,
        values=MODERATE,
        passes=("float",),
        dtypes=WIDE_RANGE,
    ),
    needs="causal_with_mask=True",
    level="SHOULD",
    must_reject=("unmasked", "lopsided"),
    number=2,
)
def later_positions_have_no_influence_beside_the_lowest_number(
    session: Session, case: Case
) -> None:
    """This holds beside left padding by the lowest number, which may be all that a row allows."""
    problem = case.problem()
    later = (~_causal_mask(session, problem)).expand(case.B, -1, -1)
    mask = problem.query.new_zeros(1, 1, 1, problem.key.shape[1])
    mask[..., : 1 + case.seed % (mask.shape[-1] - 1)] = torch.finfo(mask.dtype).min
    expect_unread(session, problem.change(mask=mask), later, case.generator, "which come after")


def _expect_explicit(
    session: Session, problem: Problem, output: RecordedTensor, because: str
) -> None:
    """Expect the output for one mask that says the same; the oracle's where no mask can."""
    claims, expected = session.claims, session.bound_of(problem)
    if claims.always_causal or not (claims.masks and claims.per_query_mask):
        expect_close(output, expected(), because=because)
        return
    joined = join_causal(problem.mask, _causal_mask(session, problem)[None, None])
    explicit = problem.change(is_causal=False, mask=joined)
    if problem.mask is None:
        explicit = as_claimed(claims, explicit, joined)
    expect_agree(output, session(explicit).output, expected, because=because)


@property_of("CAU-2", Domain(causal=CAUSAL, square=True))
def causal_flag_equals_the_triangular_mask(session: Session, case: Case) -> None:
    """is_causal=True equals the explicit lower-triangular mask, including the diagonal."""
    problem = case.problem()
    _expect_explicit(
        session, problem, session(problem).output, "the result for the lower-triangular mask"
    )


@property_of(
    "CAU-3", Domain(causal=CAUSAL, inputs=("cross",)), needs="cross_attention", may_refuse=False
)
def causal_alignment_is_as_declared(session: Session, case: Case) -> None:
    """With L != S, the declared alignment holds, or the call raises."""
    problem = case.problem()
    try:
        output = session(problem).output
    except CallRaised:
        if case.L != case.S:
            return
        raise
    because = (
        f"the result for the causal mask aligned {session.claims.causal}, with L = {case.L} and S ="
        f" {case.S}"
    )
    _expect_explicit(session, problem, output, because)


@property_of("CAU-4", Domain(masks=(*BOOLEAN, *FLOAT), causal=CAUSAL))
def causal_flag_and_mask_are_combined(session: Session, case: Case) -> None:
    """A causal flag and a mask together equal their logical AND."""
    problem = case.problem()
    because = "the result for one mask that combines the mask and the causal one"
    _expect_explicit(session, problem, session(problem).output, because)


@property_of(
    "CAU-5",
    Domain(
        causal=CAUSAL,
        square=True,
        min_L=2,
        min_S=2,
        layouts=DENSE,
        modes=WITH_GRADIENT,
        values=MODERATE,
    ),
    needs="gradients",
    must_reject=("unmasked",),
)
def later_positions_have_no_gradient(session: Session, case: Case) -> None:
    """The gradient of output i with respect to every input at j > i is exactly 0."""
    problem = case.problem()
    last = int(torch.randint(problem.query.shape[1] - 1, (1,), generator=case.generator))
    positions = torch.arange(problem.query.shape[1], device=problem.query.device)
    rows = (positions <= last).expand(case.B, -1)
    upstream = session.upstream(problem, rows)
    for name, gradient in session.gradients(problem, upstream).items():
        if name not in INPUTS:
            continue
        later = gradient[:, slice(last + 1, None)]
        expect_equal(
            later, 0.0, because=f"no output up to position {last} depends on {name} after it"
        )
