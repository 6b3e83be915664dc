"""Bits that do not change: what is right keeps them, and what switches that on is given."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.faults.base import implementation_of
from mha.conformance.faults.repeats import INVARIANT, ItemByItem
from mha.implementations import from_kernel
from mha.spec import Claims
from support.judging import expect_conforms, expect_fail


def attend(q: Tensor, k: Tensor, v: Tensor, num_splits: int = 0) -> Tensor:
    """Split the keys by the size of the batch, unless their number of parts is given."""
    parts = num_splits or 1 + 32 // len(q)
    contexts = []
    for one in zip(q, k, v, strict=True):
        own_q, own_k, own_v = (x.clone() for x in one)  # aligned alike
        weights = (own_q @ own_k.mT * q.shape[-1] ** -0.5).softmax(-1)
        pairs = zip(weights.chunk(parts, -1), own_v.chunk(parts, 1), strict=True)
        contexts.append(sum(part @ of_part for part, of_part in pairs))
    return torch.stack(contexts) if contexts else q


CLAIMS = Claims(masks=(), causal=None, returns_weights=False, dtypes={"float32", "bfloat16"})


def test_a_right_kernel_keeps_its_bits() -> None:
    expect_conforms(implementation_of(ItemByItem, INVARIANT), ["DET-1", "DET-2"])


def test_arguments_that_switch_invariance_on_are_given() -> None:
    claims = replace(CLAIMS, batch_invariant={"num_splits": 1}, repeats="both")
    assert claims.batch_invariant == (("num_splits", 1),)
    kernel = from_kernel(attend, mask=None, claims=claims)
    expect_conforms(kernel, ["DET-1", "DET-2"], dtypes=["float32", "bfloat16"])
    without = from_kernel(attend, mask=None, claims=replace(CLAIMS, batch_invariant=True))
    expect_fail(without, "DET-2", "the bits of the item")
