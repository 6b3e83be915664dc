"""Each kind of subject conforms, and is judged on every clause that its calls can state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mha.implementations.formula import with_mask
from mha.spec import Config, Options, Output, Weights
from support.effort import EVERYTHING
from support.judging import expect_fail
from support.kinds import KINDS, ClaimedOnly, Subject, judge, left_out_by_claims

# Not judged of some subjects for what a run finds of them, whatever they claim: they are no plain
# class with a constructor, their inputs are one tensor, their mask has one form or is that of all
# queries, or their heads have fixed widths.
OF_SUBJECTS = {"CFG-1", "CFG-7", "SHP-8", "MSK-6", "PTH-3", "STA-9"}

# The others are judged by `make lattice`: each takes ten seconds.
SAMPLE = (
    "GPT with padding",
    "cross-attention to a memory",
)


@pytest.mark.parametrize("kind", KINDS if EVERYTHING else SAMPLE)
def test_each_kind_conforms_and_is_judged_on_what_its_claims_allow(kind: str) -> None:
    report = judge(kind)
    failed = {
        verdict.clause
        for verdict in report.verdicts
        if verdict.status not in ("pass", "not_claimed")
    }
    assert not failed, [verdict for verdict in report.verdicts if verdict.clause in failed]
    judged = {verdict.clause for verdict in report.verdicts if verdict.status != "not_claimed"}
    claimed = {verdict.clause for verdict in report.verdicts} - set(left_out_by_claims(KINDS[kind]))
    assert claimed - OF_SUBJECTS <= judged <= claimed


class DropsInEvaluation(ClaimedOnly):
    """Dropout in evaluation too, as of a kernel with `dropout_p=self.dropout`."""

    def drop(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.config.dropout, True)


class NotDivisible(ClaimedOnly):
    """Takes any number of heads, and cuts the rest of d_model off."""

    def __init__(self, config: Config, weights: Weights) -> None:
        divisible = Config(config.n_heads * config.head_dim, config.n_heads, bias=config.bias)
        super().__init__(divisible, Weights.random(divisible, 0).to(weights.w_q.dtype))
        self.rest = config.d_model - divisible.d_model

    def forward(self, query: Tensor, *_: Tensor, **options: Any) -> Output:
        x = query[..., : query.shape[-1] - self.rest]
        output, weights, _ = super().forward(x, x, x, **options)
        return Output(F.pad(output, (0, self.rest)), weights)


class FillsWithALowNumber(ClaimedOnly):
    """A row without an allowed key attends to every key."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.masked_fill(~allowed, -1e9).softmax(-1)


class LeaksByOne(ClaimedOnly):
    """The causal mask allows the next position."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options.change(is_causal=False), q, k)
        return allowed & torch.ones_like(allowed).tril(1), bias


class KeysShifted(ClaimedOnly):
    """The mask is read one key too late."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(with_mask(options, lambda mask: mask.roll(1, -1)), q, k)


@pytest.mark.usefixtures("undiagnosed", "unshrunk")
@pytest.mark.parametrize(
    ("kind", "cls", "clause"),
    [
        ("GPT", DropsInEvaluation, "DRP-1"),
        ("GPT", NotDivisible, "CFG-1"),
        ("GPT", LeaksByOne, "CAU-1"),
        ("GPT", LeaksByOne, "CAU-2"),
        ("GPT with padding", KeysShifted, "CAU-4"),
        ("GPT with padding", KeysShifted, "MSK-7"),
        ("one mask for the batch", FillsWithALowNumber, "MSK-8"),
        ("additive masks", FillsWithALowNumber, "MSK-8"),
        ("one row of keys for all", FillsWithALowNumber, "MSK-8"),
    ],
)
def test_a_fault_that_its_kind_can_show_is_caught(
    kind: str, cls: type[ClaimedOnly], clause: str
) -> None:
    expect_fail(Subject(kind, KINDS[kind], cls), clause)
