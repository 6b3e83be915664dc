"""INC: decoding with a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import DENSE, MODERATE, Domain
from mha.conformance.expect import expect, expect_close, need
from mha.conformance.guard import guarded
from mha.conformance.properties.variants import grouped, rebuilt
from mha.conformance.registry import checks
from mha.conformance.trial import Trial
from mha.spec import Problem

STEPS = Domain(
    causal=(True,),
    square=True,
    regimes=MODERATE,
    layouts=DENSE,
    paths=("eval",),
    need_weights=(False,),
    max_length=65,
)


class Sequence:
    """A batch on its way through a decoder; its cache is what the last step gave back."""

    def __init__(self, attention: Trial, problem: Problem) -> None:
        attention.scripted = False
        self.decoder: Any = attention.built(problem).attention.eval()
        self.attention, self.problem, self.cache = attention, problem, None
        self.output = torch.zeros_like(problem.query)

    def step(self, places: Tensor, active: Tensor | None = None) -> None:
        """Decode the position `places[b]` of each item b, or of those that are active; NaN stands for the others'."""
        rows = torch.arange(len(places)), places
        inputs = [getattr(self.problem, name)[rows].unsqueeze(1) for name in ("query", "key", "value")]
        named = {}
        if active is not None:
            inputs = [x.where(active[:, None, None], torch.nan) for x in inputs]
            named = {"active": active}
        with torch.no_grad(), guarded("decode"):
            output, self.cache = self.decoder.decode(*inputs, self.cache, **named)
        shape = inputs[0].shape
        fits = isinstance(output, Tensor) and output.shape == shape
        expect(fits, f"decode gives {getattr(output, 'shape', output)!r:.80}, but should give a tensor {tuple(shape)}")
        kept = output.squeeze(1) if active is None else output.squeeze(1).where(active[:, None], self.output[rows])
        self.output[rows] = kept

    def expect_one_pass(self) -> None:
        """What was decoded is what one causal pass gives."""
        seen = self.attention.aside(self.output, "decoded")
        expect_close(seen, self.attention.answer(self.problem).output, because="one causal pass over all positions")


@checks("INC-1", STEPS, needs="decodes", after="HED-1")
def decoding_equals_one_causal_pass(attention: Trial, case: Case) -> None:
    _expect_decoded(attention, case, case.problem())


@checks("INC-1", replace(STEPS, min_heads=2, max_length=17), needs="decodes", after="HED-1", limit=20)
def grouped_decoding_equals_one_causal_pass(attention: Trial, case: Case) -> None:
    need(attention.claims.grouped_query, "needs the claim grouped_query")
    _expect_decoded(attention, case, rebuilt(case, grouped(case)))


def _expect_decoded(attention: Trial, case: Case, problem: Problem) -> None:
    """Position by position, two sequences in turn, so that a cache is not the module's but the sequence's."""
    sequences = [Sequence(attention, each) for each in (problem, problem.map_inputs(lambda x: x.flip(1)))]
    for place in range(case.L):
        for sequence in sequences:
            sequence.step(torch.full((case.B,), place))
    for sequence in sequences:
        sequence.expect_one_pass()


@checks("INC-1", replace(STEPS, min_B=2, max_length=17), needs="decodes_ragged", after="HED-1", limit=40)
def items_of_different_lengths_are_decoded_each_for_itself(attention: Trial, case: Case) -> None:
    sequence, generator = Sequence(attention, case.problem()), case.generator
    done = torch.zeros(case.B, dtype=torch.long)
    while (done < case.L).any():
        waiting = done < case.L
        active = waiting & (torch.rand(case.B, generator=generator) < 0.5)
        active = active if active.any() else waiting
        sequence.step(done.clamp(max=case.L - 1), active.to(case.device))
        done += active
    sequence.expect_one_pass()
