"""CHK: chunks of places, beyond which no query sees a key."""

from __future__ import annotations

from dataclasses import replace

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.mask_kinds import COMMON
from mha.conformance.harness.assertions import assume
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.shared_assertions import (
    assume_answered,
    expect_as_without,
    expect_effect,
    expect_gradients,
    expect_result,
    expect_together,
    options_refused_without_causal,
)

# Of a few places, of one, and at and beside the edges of tiles.
CHUNKS = (2, 1, 3, 16, 5, 17)
# Small heads leave room for two sequences of several chunks of a tile and more.
NARROW = {"n_heads": (2, 3), "head_dim": (8, 17), "B": (1, 3), "L": (197, 7, 33), "S": (197, 33)}
CHUNKED = Domain(masks=COMMON, causal=BOTH, values=MODERATE, chunks=CHUNKS)


@property_of(
    "CHK-1",
    CHUNKED,
    needs="scores.chunk",
    requires="HED-1",
    must_reject=("ignores_chunks", "lopsided"),
)
def a_chunk_has_exactly_its_keys(session: Session, case: Case) -> None:
    """With chunks the result is within the bound of the oracle's."""
    problem = case.problem()
    assume_answered(session, problem)
    with options_refused_without_causal(session, problem):
        result = session(problem)
    because = f"the oracle's value, with chunks of {case.chunk} places"
    expect_result(result, session.expected(problem), because)


@property_of(
    "CHK-1",
    replace(
        CHUNKED,
        masks=("none", "padding"),
        scale="wide",
        sizes=NARROW,
        chunks=(16, 65, 7, 33),
    ),
    needs="scores.chunk",
    requires="HED-1",
    must_reject=("ignores_chunks", "lopsided"),
    max_cases=12,
    number=2,
)
def chunks_follow_each_other(session: Session, case: Case) -> None:
    """With several chunks of longer sequences the result is within the bound of the oracle's."""
    a_chunk_has_exactly_its_keys(session, case)


@property_of(
    "CHK-1",
    replace(CHUNKED, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs=("scores.chunk", "gradients"),
    requires="HED-1",
    must_reject=("ignores_chunks", "nan_gradients"),
    max_cases=20,
    number=3,
)
def gradients_have_the_chunks(session: Session, case: Case) -> None:
    """With chunks the gradients are within the bound."""
    problem = case.problem()
    assume_answered(session, problem)
    with options_refused_without_causal(session, problem):
        expect_gradients(session, problem, None, "by the oracle's formulas, with the chunks")


@property_of(
    "CHK-1",
    replace(CHUNKED, chunks=(1024, 1 << 20)),
    needs="scores.chunk",
    requires="HED-1",
    must_reject=("lopsided",),
    max_cases=20,
    number=4,
)
def a_chunk_of_everything_equals_none(session: Session, case: Case) -> None:
    """A chunk that holds all places gives the result of a call without chunks."""
    problem, plain = case.problem(), case.problem(chunk=None)
    alignment = session.claims.alignment
    holds_all = torch.equal(problem.allowed(alignment), plain.allowed(alignment))
    assume(holds_all, "queries before the first key are in no chunk with one")
    assume_answered(session, problem)
    with options_refused_without_causal(session, problem):
        output = session(problem).output
    expect_as_without(session, output, plain, "chunks")


@property_of(
    "CHK-1",
    replace(
        CHUNKED,
        windows=(None, (1, 0), (2, 1)),
        softcaps=(None, 1.0),
        sinks=("none", "mixed"),
        slopes=("none", "mixed"),
        scales=(None, 2.0),
        variants=("plain", "grouped"),
        min_heads=2,
    ),
    needs="scores.chunk",
    requires="CHK-1",
    must_reject=("ignores_chunks",),
    max_cases=20,
    number=5,
)
def chunks_go_with_other_options(session: Session, case: Case) -> None:
    """With chunks beside other options or grouped heads the result is within the bound."""
    expect_together(session, case.problem())


@property_of(
    "EFF-1",
    replace(CHUNKED, masks=("none",), chunks=(2, 1, 3), min_L=2, min_S=3),
    needs="scores.chunk",
    requires="HED-1",
    must_reject=("ignores_chunks",),
    max_cases=20,
    number=6,
)
def chunks_have_an_effect(session: Session, case: Case) -> None:
    """Where chunks change the exact result by ten times the bound, the result changes too."""
    expect_effect(session, case.problem(), "chunk")
