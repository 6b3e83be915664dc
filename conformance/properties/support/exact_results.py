"""Problems whose results are numbers of the dtype, and so need no rounding (EQV-5, EQV-6)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.transforms import passing_heads
from mha.conformance.harness.assertions import assume, expect_close
from mha.conformance.harness.session import Session
from mha.spec import Problem
from mha.spec.bounds import Ball, units_of
from mha.spec.dtypes import TRAITS


def with_identity(problem: Problem, *roles: str) -> Problem:
    """Make these projections the identity, without bias, and the output the heads' contexts.

    A key or value that all heads share gets the first columns; see `of_heads`.
    """
    named = dict(problem.weights.named())
    changes = {}
    for role in roles:
        weight, bias = f"w_{role}", f"b_{role}"
        changes[weight] = torch.eye(*named[weight].shape).to(problem.query)
        if bias in named:
            changes[bias] = named[bias] * 0
    return passing_heads(problem).change(**changes)


def of_heads(problem: Problem, values: Tensor) -> Tensor:
    """Return values (..., D) as the heads have them, where their projection is the identity."""
    config = problem.config
    shared = values[..., : len(problem.weights.w_v)]
    return torch.cat([shared] * (config.n_heads // config.kv_heads), -1)


def factor_for_scale(session: Session, case: Case) -> float:
    """Return the power of two, with a sign, that makes up for a claimed scale."""
    scale, usual = session.claims.scale_for(case.head_dim), case.head_dim**-0.5
    assume(scale != 0, "the scale that is claimed is 0, so all scores are")
    factor = 2.0 ** math.ceil(math.log2(usual / abs(scale)))
    fits = factor <= 2 or not TRAITS[case.dtype].narrow
    assume(
        fits,
        f"with the scale {scale}, scores that are large enough overflow before they are scaled",
    )
    return math.copysign(factor, scale)


def is_exact(session: Session) -> bool:
    """Return whether results that need no rounding must be exact."""
    rounding = session.claims.rounding
    return not (session.claims.retiles or rounding.log_normaliser or rounding.heads_stored)


def expect_exact(
    session: Session,
    problem: Problem,
    exact: Tensor,
    because: str,
    rows: Tensor | slice = slice(None),
) -> None:
    """Some rows are exact where nothing needs rounding; within the bound where it is declared.

    exact: (B, number of rows, D).
    rows: their indices.
    """
    output = session(problem).output[:, rows]
    if not is_exact(session):
        expect_close(output, session.expected(problem).output[:, rows], because=because)
        return
    # An exponential may give the smallest normal number for 0.
    largest_value = problem.value.double().abs().max()
    least = units_of(exact.dtype).flush * problem.key.shape[1] * largest_value
    expected = Ball(exact.double(), torch.full_like(exact, float(least), dtype=torch.float64))
    expect_close(output, expected, because=f"{because}, so nothing is rounded")
