"""Faults over ranks that only the directed tests of DST-1 and DST-2 see, in half precision."""

from __future__ import annotations

from torch import Tensor

from mha.conformance.faults.families import hooked, is_half
from mha.conformance.faults.fault import fault
from mha.conformance.faults.ranks import Part, SequenceParallel

OF_OUTPUT, OF_GRADIENTS = (
    "errors_over_ranks_do_not_add_up_to_a_defect",
    "errors_of_gradients_over_ranks_do_not_add_up_to_a_defect",
)


@fault("DST-1", dtype="bfloat16", caught_by=OF_OUTPUT, trigger="half precision")
class RescalingOffInHalf(SequenceParallel):
    """In half precision the merge rescales what it has so far by 2% too much."""

    def merge(self, one: Part, other: Part) -> Part:
        context, z = super().merge(one, other)
        share = (one[1] - z).exp().nan_to_num().detach()
        if is_half(self.w_o):
            context = context + 0.02 * share * one[0]
        return context, z


@fault("DST-2", dtype="bfloat16", caught_by=OF_GRADIENTS, trigger="half precision, backwards")
class GatheredGradientsOffInHalf(SequenceParallel):
    """In half precision the gradients of gathered keys and values are 4% too large."""

    def gather(self, x: Tensor, lengths: list[int]) -> list[Tensor]:
        factor = 1.04 if is_half(x) else 1.0
        return super().gather(hooked(x, lambda gradient: gradient * factor), lengths)
