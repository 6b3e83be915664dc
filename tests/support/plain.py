"""A right class of self-attention whose steps other tests change, and how they look at what is
inferred of it.
"""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from mha.conformance import check
from mha.implementations import ImplementationError
from mha.implementations.inference.infer import Inference, infer


def evidence(result: Inference) -> dict[str, str]:
    """Return how each row of the report was found."""
    return {row.topic: row.evidence for row in result.rows}


def refusal_of(cls: type[nn.Module]) -> str:
    """Return the message with which inference refuses a class, which is one line."""
    with pytest.raises(ImplementationError) as raised:
        infer(cls)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def verdict(result: Inference, clause: str) -> tuple[str, bool]:
    (found,) = check(result.implementation, "quick", clauses=[clause], dtypes=["float32"]).verdicts
    return found.status, found.conforms


class Plain(nn.Module):
    """Self-attention with a stacked projection; each class below changes one step."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.place(q), self.place(k)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        context = self.weigh(scores, mask) @ v
        output: Tensor = self.proj(context.transpose(1, 2).flatten(2))
        return output

    def place(self, q: Tensor) -> Tensor:
        return q

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return (scores if mask is None else scores.masked_fill(~mask, float("-inf"))).softmax(-1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, mask)
