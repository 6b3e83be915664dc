"""A right class whose layers and inputs other tests rename, and what they expect of the table."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mha.conformance import check
from mha.implementations.inference.infer import infer
from mha.spec import Config

CLAUSES = [
    *(
        "CFG-1",
        "CFG-4",
        "SHP-1",
        "SHP-4",
        "MSK-1",
        "MSK-2",
        "MSK-5",
        "CAU-1",
        "PTH-3",
        "HED-1",
        "NUM-1",
        "GRD-5",
    ),
    *("DRP-3", "XAT-1"),
]


class Heads(nn.Module):
    """Four layers; a hidden pair is True, or the lowest number in a mask that is added."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        Config(d_model, n_heads).validate()
        self.n_heads = n_heads
        for name in ("w_q", "w_k", "w_v", "w_o"):
            setattr(self, name, nn.Linear(d_model, d_model))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *masks: Tensor | None) -> Tensor:
        """Return the contexts (B, L, D) of projected inputs."""
        scores = self.split(q) @ self.split(k).mT * (q.shape[-1] // self.n_heads) ** -0.5
        for mask in masks:
            if mask is not None:
                assert torch.broadcast_shapes(mask.shape, scores.shape) == scores.shape
                scores = (
                    scores.masked_fill(mask, -math.inf)
                    if mask.dtype == torch.bool
                    else scores + mask
                )
        return (scores.softmax(-1) @ self.split(v)).transpose(1, 2).flatten(2)

    def of(self, query: Tensor, key: Tensor, value: Tensor, *masks: Tensor | None) -> Tensor:
        output: Tensor = self.w_o(
            self.attend(self.w_q(query), self.w_k(key), self.w_v(value), *masks)
        )
        return output


def expect_read(cls: type[nn.Module], row: str, judged: str) -> None:
    """Expect a row in the table of what is inferred, and that the class conforms, in one clause at
    least.
    """
    result = infer(cls)
    assert row in result.report(400)
    report = check(result.implementation, "quick", clauses=CLAUSES, dtypes=["float32"])
    statuses = {verdict.clause: verdict.status for verdict in report.verdicts}
    assert set(statuses.values()) <= {"pass", "not_claimed"}
    assert statuses[judged] == "pass"
