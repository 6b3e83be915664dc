"""Judge an attention in float8 after adding its row to the table; `test_dtypes.py` runs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mha.spec import dtypes

FLOAT8 = dtypes.DtypeTraits(
    name="float8_e4m3fn", compute="float32", narrow=True, far=4.0, noise=10.0
)
# Before other modules read it.
dtypes.TRAITS = {**dtypes.TRAITS, FLOAT8.name: FLOAT8}

from mha.conformance import check  # noqa: E402  the row comes first
from mha.spec import Claims, Config, Output, Weights  # noqa: E402  the row comes first


class StoredInFloat8(nn.Module):
    """Inputs, weights and results are float8; everything between them is float32."""

    def __init__(self, config: Config, weights: Weights, ignores_mask: bool) -> None:
        super().__init__()
        self.config, self.ignores_mask = config, ignores_mask
        for name, tensor in weights.named():
            self.register_buffer(name, tensor)

    def project(self, x: Tensor, role: str) -> Tensor:
        buffers = {name: tensor.float() for name, tensor in self.named_buffers()}
        return nn.functional.linear(x.float(), buffers[f"w_{role}"], buffers.get(f"b_{role}"))

    def forward(
        self, *inputs: Tensor, mask: Any = None, is_causal: bool = False, need_weights: bool = False
    ) -> Output:
        shape = self.config.n_heads, self.config.head_dim
        q, k, v = (
            self.project(x, role).unflatten(-1, shape).transpose(1, 2)
            for role, x in zip("qkv", inputs, strict=True)
        )
        scores = q @ k.mT / shape[1] ** 0.5
        if is_causal:
            scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
        if mask is not None and not self.ignores_mask:
            scores = scores.masked_fill(~mask, -torch.inf)
        weights = scores.softmax(-1)
        output = self.project((weights @ v).transpose(1, 2).flatten(2), "o")
        dtype = inputs[0].dtype
        return Output(output.to(dtype), weights.to(dtype) if need_weights else None)


class Float8:
    """The implementation, or a faulty one."""

    name = "float8"
    claims = Claims(dtypes={FLOAT8.name}, gradients=False, weight_gradients=False)

    def __init__(self, ignores_mask: bool) -> None:
        self.ignores_mask = ignores_mask

    def build(
        self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str
    ) -> StoredInFloat8:
        """Build it."""
        return StoredInFloat8(config, weights, self.ignores_mask)


if __name__ == "__main__":
    clauses = ("SHP-1", "SHP-3", "MSK-1", "NUM-1")
    for ignores_mask, profile in ((False, "smoke"), (True, "quick")):
        report = check(Float8(ignores_mask), profile, clauses=clauses, dtypes=(FLOAT8.name,))
        print({verdict.clause: verdict.status for verdict in report.verdicts})
