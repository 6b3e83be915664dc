"""Faults that MEM-1 must catch: memory that grows with the product of the lengths."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.base import CALLED, Complete
from mha.conformance.faults.fault import fault
from mha.spec import Output, Rounding, validate_call

LINEAR = replace(
    CALLED,
    masks={"bool"},
    returns_weights=False,
    second_gradients=False,
    grouped_query=False,
    rounding=Rounding(),
    memory="linear",
)


@fault("MEM-1", claims=LINEAR, script_shows=False)
class StoresScores(Complete):
    """The scores of all queries and keys are stored."""


@fault("MEM-1", claims=LINEAR, script_shows=False, trigger="a mask of keys")
class MaskExpanded(Complete):
    """A mask of keys is copied for each query of each head."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, need_weights: bool
    ) -> Output:
        validate_call(self.config, query, key, value, mask)
        q, k, v = (self.split(self.project(x, role)) for x, role in ((query, "q"), (key, "k"), (value, "v")))
        if mask is not None and is_causal:
            return super().attend(query, key, value, mask, is_causal, need_weights)
        if mask is not None:
            mask = mask.expand(len(q), q.shape[1], q.shape[2], k.shape[2]).contiguous()
        context = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=self.given_scale)
        return Output(self.project(self.merge(context), "o"), None)
