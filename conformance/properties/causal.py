"""CAU: the causal flag."""

from __future__ import annotations

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import DENSE, MODERATE, NOT_FLOAT16, WITH_GRADIENT, Domain
from mha.conformance.cases.masks import BOOLEAN, FLOAT
from mha.conformance.cases.transforms import as_claimed
from mha.conformance.harness.assertions import expect_agree, expect_equal
from mha.conformance.harness.errors import Refusal
from mha.conformance.harness.session import Trial
from mha.conformance.properties.registry import checks
from mha.conformance.properties.shared import expect_unread
from mha.spec import Problem, causal_mask, join_causal
from mha.spec.problem import INPUTS

CAUSAL = (True,)


def _causal(attention: Trial, problem: Problem) -> torch.Tensor:
    alignment = attention.claims.causal
    assert alignment is not None
    return causal_mask(problem.query.shape[1], problem.key.shape[1], alignment, problem.query.device)


@checks(
    "CAU-1",
    Domain(masks=("none", *BOOLEAN), causal=CAUSAL, square=True, min_L=2, min_S=2, layouts=DENSE),
    rejects=("unmasked", "noise"),
    floor=0.3,
)
def later_positions_have_no_influence(attention: Trial, case: Case) -> None:
    problem = case.problem()
    later = (~_causal(attention, problem)).expand(case.B, -1, -1)
    expect_unread(attention, problem, later, case.generator, "which come after this query")


@checks(
    "CAU-1",
    Domain(
        causal=CAUSAL,
        square=True,
        min_L=2,
        min_S=2,
        layouts=DENSE,
        regimes=MODERATE,
        passes=("float",),
        dtypes=NOT_FLOAT16,
    ),
    rejects=("unmasked", "noise"),
    floor=0.3,
    number=2,
)
def later_positions_have_no_influence_beside_the_lowest_number(attention: Trial, case: Case) -> None:
    """Padding on the left, written as the lowest number: a row of nothing else is no empty row, and sees no further."""
    problem = case.problem()
    later = (~_causal(attention, problem)).expand(case.B, -1, -1)
    mask = problem.query.new_zeros(1, 1, 1, problem.key.shape[1])
    mask[..., : 1 + case.seed % (mask.shape[-1] - 1)] = torch.finfo(mask.dtype).min
    expect_unread(attention, problem.change(mask=mask), later, case.generator, "which come after this query")


@checks("CAU-2", Domain(causal=CAUSAL, square=True), needs="masks")
def causal_flag_equals_the_triangular_mask(attention: Trial, case: Case) -> None:
    problem = case.problem()
    explicit = as_claimed(attention.claims, problem, _causal(attention, problem)).change(is_causal=False)
    bound = attention.answer(problem).output
    seen, expected = attention(problem).output, attention(explicit).output
    expect_agree(seen, expected, bounds=(bound, bound), because="what the lower-triangular mask gives")


@checks("CAU-3", Domain(causal=CAUSAL, inputs=("cross",)), needs="masks")
def causal_alignment_is_as_declared(attention: Trial, case: Case) -> None:
    problem = case.problem()
    explicit = as_claimed(attention.claims, problem, _causal(attention, problem)).change(is_causal=False)
    bound = attention.answer(problem).output
    try:
        seen = attention(problem).output
    except Refusal:
        if case.L != case.S:
            return  # the clause allows a call with L != S to be refused
        raise
    because = f"what the mask aligned {attention.claims.causal} gives, with L = {case.L} and S = {case.S}"
    expect_agree(seen, attention(explicit).output, bounds=(bound, bound), because=because)


@checks("CAU-4", Domain(masks=(*BOOLEAN, *FLOAT), causal=CAUSAL))
def causal_flag_and_mask_join(attention: Trial, case: Case) -> None:
    problem = case.problem()
    both = join_causal(problem.mask, _causal(attention, problem))
    explicit = problem.change(is_causal=False, mask=both)
    bound = attention.answer(problem).output
    seen, expected = attention(problem).output, attention(explicit).output
    expect_agree(seen, expected, bounds=(bound, bound), because="what the mask joined to the triangular one gives")


@checks(
    "CAU-5",
    Domain(causal=CAUSAL, square=True, min_L=2, min_S=2, layouts=DENSE, paths=WITH_GRADIENT, regimes=MODERATE),
    needs="gradients",
    rejects=("unmasked",),
)
def later_positions_have_no_gradient(attention: Trial, case: Case) -> None:
    problem = case.problem()
    last = int(torch.randint(problem.query.shape[1] - 1, (1,), generator=case.generator))
    rows = (torch.arange(problem.query.shape[1], device=problem.query.device) <= last).expand(case.B, -1)
    upstream = attention.upstream(problem, rows)
    for name, gradient in attention.gradients(problem, upstream).items():
        if name not in INPUTS:
            continue
        later = gradient[:, slice(last + 1, None)]
        expect_equal(later, 0.0, because=f"{name} after position {last} cannot move the outputs up to it")
