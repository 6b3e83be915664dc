"""INC: decoding with a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import DENSE, MODERATE, Domain
from mha.conformance.cases.transforms import extra_keys, with_extra
from mha.conformance.harness.assertions import expect, expect_close
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.session import Instance, Session
from mha.conformance.properties.dropout import dropping
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.variants import grouped, rebuilt
from mha.spec import Problem

STEPS = Domain(
    causal=(True,),
    square=True,
    values=MODERATE,
    layouts=DENSE,
    modes=("eval",),
    need_weights=(False,),
    max_length=65,
)


class Sequence:
    """A batch on its way through a decoder; its cache is what the last step gave back."""

    def __init__(self, session: Session, problem: Problem, via: Instance | None = None) -> None:
        session.scripted = False
        self.decoder: Any = (via or session.built(problem)).attention.eval()
        self.attention, self.problem, self.cache = session, problem, None

    def step(self, inputs: list[Tensor], active: Tensor | None = None) -> Tensor:
        """Decode one position of query, key and value; return its output (B, 1, D)."""
        named = {} if active is None else {"active": active}
        with torch.no_grad(), guarded("decode"):
            output, self.cache = self.decoder.decode(*inputs, self.cache, **named)
        shape = tuple(inputs[0].shape)
        fits = isinstance(output, Tensor) and tuple(output.shape) == shape
        expect(fits, f"decode gives {getattr(output, 'shape', output)!r:.80}, but should give a tensor {shape}")
        found: Tensor = output
        return found

    def at(self, place: int) -> Tensor:
        """Decode the position at a place."""
        return self.step([x[:, place : place + 1] for x in _inputs(self.problem)])

    def expect_one_pass(self, decoded: Tensor) -> None:
        """What was decoded is what one causal pass gives."""
        seen = self.attention.unscripted(decoded, "decoded")
        expect_close(seen, self.attention.expected(self.problem).output, because="one causal pass over all positions")


@property_of("INC-1", STEPS, needs="decodes", requires="HED-1")
def decoding_equals_one_causal_pass(session: Session, case: Case) -> None:
    _expect_decoded(session, case, case.problem())


@property_of(
    "INC-1",
    replace(STEPS, min_heads=2, max_length=17),
    needs=("decodes", "grouped_query"),
    requires="HED-1",
    max_cases=20,
    number=2,
)
def grouped_decoding_equals_one_causal_pass(session: Session, case: Case) -> None:
    _expect_decoded(session, case, rebuilt(case, grouped(case)))


def _expect_decoded(session: Session, case: Case, problem: Problem) -> None:
    """Position by position, two sequences in turn, so that a cache is not the module's but the sequence's."""
    if session.claims.dropout and case.seed % 2:  # none of it in evaluation
        problem = dropping(problem, 0.5)
    sequences = [Sequence(session, each) for each in (problem, problem.map_inputs(lambda x: x.flip(1)))]
    outputs: tuple[list[Tensor], list[Tensor]] = [], []
    for place in range(problem.query.shape[1]):
        for sequence, found in zip(sequences, outputs, strict=True):
            found.append(sequence.at(place))
    for sequence, found in zip(sequences, outputs, strict=True):
        sequence.expect_one_pass(torch.cat(found, 1))


@property_of("INC-1", replace(STEPS, max_length=2), needs="decodes", requires="HED-1", max_cases=1, number=3)
def long_decoding_equals_one_causal_pass(session: Session, case: Case) -> None:
    """Longer than a cache often is at first, in heads of an everyday width."""
    _expect_decoded(session, case, replace(case, head_dim=64, L=260, S=260).problem())


@property_of(
    "INC-1",
    replace(STEPS, max_length=9),
    needs=("decodes", "extras=bias_kv|zero_key"),
    requires="HED-1",
    max_cases=10,
    number=4,
)
def extra_keys_are_not_decoded_anew(session: Session, case: Case) -> None:
    """They are there from the first position on, and once."""
    keys = extra_keys(session.claims)
    _expect_decoded(session, case, with_extra(case.problem(), case, keys[case.seed // 2 % len(keys)]))


@property_of(
    "INC-1", replace(STEPS, min_B=2, max_length=17), needs="decodes_ragged", requires="HED-1", max_cases=40, number=5
)
def items_of_different_lengths_are_decoded_each_for_itself(session: Session, case: Case) -> None:
    _expect_ragged(session, case)


@property_of(
    "INC-1", replace(STEPS, min_B=3, max_length=2), needs="decodes_ragged", requires="HED-1", max_cases=1, number=6
)
def long_items_are_decoded_each_for_itself(session: Session, case: Case) -> None:
    """Longer than a page of a cache often is."""
    _expect_ragged(session, replace(case, L=70, S=70))


def _expect_ragged(session: Session, case: Case) -> None:
    """In each step some items have a position, and the others numbers that must not matter."""
    problem, generator = case.problem(), case.generator
    sequence, decoded = Sequence(session, problem), torch.zeros_like(problem.query)
    done, items = torch.zeros(case.B, dtype=torch.long), torch.arange(case.B)
    pace = 0.8 / (1 + torch.randperm(case.B, generator=generator))
    while (done < case.L).any():
        waiting = done < case.L
        active = waiting & (torch.rand(case.B, generator=generator) < pace)
        active = active if active.any() else waiting
        now = items, done.clamp(max=case.L - 1)
        own = active[:, None, None].to(case.device)
        inputs = [x[now].unsqueeze(1) for x in _inputs(problem)]
        output = sequence.step([x.where(own, 3 - x) for x in inputs], active.to(case.device))
        decoded[items[active], done[active]] = output.squeeze(1)[active]
        done += active
    sequence.expect_one_pass(decoded)


def _inputs(problem: Problem) -> list[Tensor]:
    return [problem.query, problem.key, problem.value]
