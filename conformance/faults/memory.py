"""Faults that MEM-1 must catch: memory that grows with the product of the lengths."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.base import CALLED, Complete
from mha.conformance.faults.fault import fault
from mha.spec import Options, Output, Rounding, validate_call

LINEAR = replace(
    CALLED,
    masks={"bool"},
    returns_weights=False,
    second_gradients=False,
    grouped_query=False,
    rounding=Rounding(),
    memory="linear",
)


@fault("MEM-1", claims=LINEAR, script_shows=False, trigger="a mask of keys")
class MaskExpanded(Complete):
    """A mask of keys is copied for each query of each head."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        validate_call(self.config, query, key, value, options.mask)
        q, k, v = (
            self.split(self.project(x, role))
            for x, role in ((query, "q"), (key, "k"), (value, "v"))
        )
        if options.mask is not None and options.is_causal:
            return super().attend(query, key, value, options)
        if options.mask is not None:
            options = options.change(
                mask=options.mask.expand(*q.shape[:3], k.shape[2]).contiguous()
            )
        arguments = {"is_causal": options.is_causal, "scale": options.scale}
        context = F.scaled_dot_product_attention(q, k, v, options.mask, **arguments)
        return Output(self.project(self.merge(context), "o"), None)
