"""Faults that DET must catch: bits that change from call to call, or with a batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.faults.base import CALLED, Complete
from mha.conformance.faults.families import hooked
from mha.conformance.faults.fault import fault
from mha.spec import Options, Output

INVARIANT = replace(CALLED, batch_invariant=True)
FORWARD, BACKWARD = "a_second_call_has_the_same_bits", "a_second_backward_pass_has_the_same_bits"
PLACE = "an_item_does_not_depend_on_place_and_neighbours"
NUMBER = "an_item_does_not_depend_on_the_number_of_items"


class ItemByItem(Complete):
    """Correct, with bits of an item that do not depend on the others."""

    splits = 1
    shift = 0.0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        """Attend to one item after another."""
        self.splits, self.shift = self.splits_for(len(query)), self.shift_for(query)
        outputs = []
        for item in range(len(query)):
            own = slice(item, item + 1)
            # Copies, since products depend on how an item is aligned in memory.
            inputs = (x[own].clone() for x in (query, key, value))
            mask = options.mask
            if mask is not None and mask.ndim == 4 and len(mask) > 1:
                mask = mask[own]
            of_item = options.change(mask=mask, return_lse=None, need_weights=False)
            outputs.append(super().attend(*inputs, of_item).output)
        return Output(torch.cat(outputs), None, None)

    def splits_for(self, items: int) -> int:
        """Return into how many parts the keys are split."""
        del items
        return 1

    def shift_for(self, query: Tensor) -> float:
        """Return what is subtracted from all scores before the softmax."""
        del query
        return 0.0

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        v = v.masked_fill(~allowed.any(2).unsqueeze(-1), 0.0)
        parts = zip(weights.chunk(self.splits, -1), v.chunk(self.splits, 2), strict=True)
        total = weights.new_zeros(())
        for part, of_part in parts:
            total = total + part @ of_part
        return total

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores - self.shift, allowed)


@fault("DET-1", claims=CALLED, caught_by=FORWARD, script_shows=False)
class AnyOrderOfKeys(Complete):
    """The keys are summed up in an order that differs from call to call, as with atomics."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        order = torch.randperm(v.shape[2])
        total = super().combine(weights, v, allowed) * 0
        for part in order.split(3):
            total = total + super().combine(weights[..., part], v[:, :, part], allowed[..., part])
        return total


@fault(
    "DET-1",
    claims=CALLED,
    caught_by=BACKWARD,
    script_shows=False,
    source="https://github.com/Dao-AILab/flash-attention/issues/414",
)
class AnyOrderBackwards(Complete):
    """The gradient of the queries is summed up in an order that differs from call to call."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        def unordered(gradient: Tensor) -> Tensor:
            parts = (gradient / 3, gradient / 7, gradient * (1 - 1 / 3 - 1 / 7))
            first, second, third = (parts[place] for place in torch.randperm(3))
            return (first + second) + third

        return hooked(super().score(q, k), unordered)


@fault(
    "DET-2",
    claims=INVARIANT,
    caught_by=NUMBER,
    trigger="more than 32 items",
    source="https://github.com/Dao-AILab/flash-attention/pull/2450",
)
class SplitsByTheBatch(ItemByItem):
    """The keys are split in two where there are at most 32 items."""

    def splits_for(self, items: int) -> int:
        return 2 if items <= 32 else 1


@fault("DET-2", claims=INVARIANT, caught_by=PLACE)
class ShiftOfTheBatch(ItemByItem):
    """The largest number of the whole batch is subtracted from all scores."""

    def shift_for(self, query: Tensor) -> float:
        return float(query.detach().abs().max())
