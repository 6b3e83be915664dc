"""INC: decoding with a key/value cache."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.transforms import extra_keys, with_dropout, with_extra
from mha.conformance.harness.assertions import assume
from mha.conformance.harness.errors import Discard, Violation
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.decoded_sequence import DecodedSequence
from mha.conformance.properties.support.domains import DECODING
from mha.spec import Options, Problem

# Long enough to be cut.
CHUNKS = replace(DECODING, min_L=2, min_S=2)
# Several items, which are decoded before and after an edit of their cache.
EDITED = replace(DECODING, min_B=2, min_L=3, min_S=3, max_length=17)


@property_of(
    "INC-1", replace(DECODING, variants=("plain", "grouped")), needs="decodes", requires="HED-1"
)
def decoding_equals_one_causal_pass(session: Session, case: Case) -> None:
    """Decoding position by position equals one causal pass, with fewer key/value heads too."""
    _expect_decoded(session, case, case.problem())


def _expect_decoded(session: Session, case: Case, problem: Problem) -> None:
    """Two sequences, decoded in turn, equal one causal pass each: a cache is of one sequence."""
    if session.claims.dropout and case.seed % 2:  # none of it in evaluation
        problem = with_dropout(problem, 0.5)
    sequences = [
        DecodedSequence(session, each)
        for each in (problem, problem.map_inputs(lambda x: x.flip(1)))
    ]
    decoded: tuple[list[Tensor], list[Tensor]] = [], []
    for position in range(problem.query.shape[1]):
        for sequence, outputs in zip(sequences, decoded, strict=True):
            outputs.append(sequence.decode_position(position))
    for sequence, outputs in zip(sequences, decoded, strict=True):
        sequence.expect_one_pass(torch.cat(outputs, 1))


@property_of(
    "INC-1",
    replace(
        DECODING,
        windows=(None, (2, 0), (0, 0), (5, 0)),
        chunks=(None, 3),
        softcaps=(None, 1.0),
        scales=(None, 2.0),
        variants=("plain", "grouped"),
        min_L=3,
        min_S=3,
        max_length=17,
    ),
    needs=("decodes", "scores.window|scores.chunk|scores.softcap|scores.scale"),
    requires="HED-1",
    max_cases=24,
    number=9,
)
def decoding_goes_with_options(session: Session, case: Case) -> None:
    """Decoding with a window, chunks, a cap or a scale equals one causal pass with it."""
    problem = case.problem()
    options = problem.options
    assume(bool(options.of_scores), "the call has no options")
    decoder = session.derive(
        session.built(problem), partial(_decoder_with, options=options), "{}.decoder_with(...)"
    )
    assume(decoder.attention is not None, "it decodes without these options only")
    sequence = DecodedSequence(session, problem, via=decoder)
    chunks, start = list[Tensor](), 0
    if session.claims.decodes == "chunks":
        start = case.seed % case.L
        if start:
            chunks.append(sequence.decode_positions(0, start))
    chunks.append(sequence.decode_rest(start))
    sequence.expect_one_pass(torch.cat(chunks, 1))


def _decoder_with(attention: Any, options: Options) -> Any:
    """Return a decoder that has options in each step; None if there is none."""
    make = getattr(attention, "decoder_with", None)
    return None if make is None else make(options)


@property_of(
    "INC-1",
    replace(DECODING, max_length=2),
    needs="decodes",
    requires="HED-1",
    max_cases=1,
    number=3,
    must_reject=("lopsided",),
)
def long_decoding_equals_one_causal_pass(session: Session, case: Case) -> None:
    """Decoding 260 positions, more than caches often start with, equals one causal pass."""
    _expect_decoded(session, case, replace(case, head_dim=64, L=260, S=260).problem())


@property_of(
    "INC-1",
    replace(DECODING, max_length=9),
    needs=("decodes", "extras=bias_kv|zero_key"),
    requires="HED-1",
    max_cases=10,
    number=4,
)
def extra_keys_count_once_in_decoding(session: Session, case: Case) -> None:
    """Extra keys take part in each step from the first one on, and once."""
    keys = extra_keys(session.claims)
    _expect_decoded(
        session, case, with_extra(case.problem(), case, keys[case.seed // 2 % len(keys)])
    )


@property_of(
    "INC-1",
    replace(DECODING, min_B=2, max_length=17),
    needs="decodes_ragged",
    requires="HED-1",
    max_cases=40,
    number=5,
)
def items_of_different_lengths_are_decoded_each_for_itself(session: Session, case: Case) -> None:
    """Items that advance at their own pace equal one causal pass."""
    _expect_ragged(session, case)


@property_of(
    "INC-1",
    replace(DECODING, min_B=3, max_length=2),
    needs="decodes_ragged",
    requires="HED-1",
    max_cases=1,
    number=6,
    must_reject=("lopsided",),
)
def long_items_are_decoded_each_for_itself(session: Session, case: Case) -> None:
    """Items that advance at their own pace equal one causal pass beyond a usual page of a cache."""
    _expect_ragged(session, replace(case, L=70, S=70))


def _expect_ragged(session: Session, case: Case) -> None:
    """Decoding equals one causal pass if in each step only some items have a position."""
    sequence = DecodedSequence(session, case.problem())
    sequence.expect_one_pass(sequence.decode_ragged(case.generator))


@property_of("INC-2", CHUNKS, needs="decodes=chunks", requires="HED-1", max_cases=40)
def chunks_against_a_cache_equal_one_causal_pass(session: Session, case: Case) -> None:
    """However a sequence is cut into chunks, decoding them equals one causal pass."""
    sequence = DecodedSequence(session, case.problem())
    ends = _ends_of_chunks(case)
    chunks = [sequence.decode_positions(start, end) for start, end in pairwise([0, *ends])]
    sequence.expect_one_pass(torch.cat(chunks, 1))


@property_of(
    "INC-2",
    CHUNKS,
    needs="decodes=True",
    requires="HED-1",
    must_reject=(),
    level="SHOULD",
    max_cases=10,
    number=2,
)
def several_positions_at_once_are_right_or_refused(session: Session, case: Case) -> None:
    """Several positions, where one at a time is claimed, equal one causal pass or are refused."""
    sequence = DecodedSequence(session, case.problem())
    ends = _ends_of_chunks(case)
    try:
        chunks = [sequence.decode_positions(start, end) for start, end in pairwise([0, *ends])]
    except Violation as refused:
        raise Discard("it refuses several positions at once") from refused
    sequence.expect_one_pass(torch.cat(chunks, 1))


def _ends_of_chunks(case: Case) -> list[int]:
    """Return where the chunks of a sequence end: at its end only, or at random positions too."""
    inner = 0 if case.seed % 3 == 0 else min(case.L - 1, 1 + case.seed % 4)
    order = torch.randperm(case.L - 1, generator=case.generator) + 1
    return [*sorted(order[:inner].tolist()), case.L]


@property_of(
    "INC-3", EDITED, needs=("decodes", "cache_edits=reorder"), requires="HED-1", max_cases=20
)
def reordered_cache_decodes_the_items_that_it_holds(session: Session, case: Case) -> None:
    """After its items are reordered, some twice and some dropped, a cache decodes those it has."""
    problem, middle = case.problem(), case.L // 2 + 1
    sequence = DecodedSequence(session, problem)
    sequence.decode_until(middle)
    items = torch.randint(case.B, (case.B,), generator=case.generator).to(problem.query.device)
    sequence.reorder(items)
    sequence.problem = problem.map_inputs(
        lambda x: torch.cat([x[items, :middle], x[:, middle:]], 1)
    )
    sequence.expect_one_pass(sequence.decode_rest(middle), middle)


@property_of(
    "INC-3", EDITED, needs=("decodes", "cache_edits=crop"), requires="HED-1", max_cases=20, number=2
)
def cropped_cache_forgets_what_came_after(session: Session, case: Case) -> None:
    """After rejected positions are cropped, decoding goes on as if they had never been."""
    problem, kept = case.problem(), 1 + case.seed % (case.L - 1)
    sequence = DecodedSequence(session, _other_from(problem, kept))
    sequence.decode_until(case.L)
    sequence.crop(kept)
    sequence.problem = problem
    sequence.expect_one_pass(sequence.decode_rest(kept), kept)


@property_of(
    "INC-3", EDITED, needs=("decodes", "cache_edits=copy"), requires="HED-1", max_cases=20, number=3
)
def copied_cache_is_one_of_its_own(session: Session, case: Case) -> None:
    """A cache and its copy go on in turn, each with positions of its own."""
    problem, shared = case.problem(), 1 + case.seed % (case.L - 1)
    sequence = DecodedSequence(session, problem)
    sequence.decode_until(shared)
    sequences = [sequence, sequence.branch(_other_from(problem, shared))]
    decoded: tuple[list[Tensor], list[Tensor]] = [], []
    for position in range(shared, case.L):
        for each, outputs in zip(sequences, decoded, strict=True):
            outputs.append(each.decode_position(position))
    for each, outputs in zip(sequences, decoded, strict=True):
        each.expect_one_pass(torch.cat(outputs, 1), shared)


def _other_from(problem: Problem, start: int) -> Problem:
    """Return a problem whose inputs are others from a position on."""
    return problem.map_inputs(lambda x: torch.cat([x[:, :start], -x[:, start:].flip(1)], 1))
