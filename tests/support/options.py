"""A right class with an option of each kind, for tests that change one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Plain(nn.Module):
    """Self-attention with an option of each kind, for classes that change one."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.n_heads, self.drop = n_heads, nn.Dropout(dropout)
        self.q, self.k, self.v, self.out = (
            nn.Linear(d_model, d_model, bias=bias) for _ in range(4)
        )

    def weigh(self, weights: Tensor) -> Tensor:
        return weights

    def finish(self, output: Tensor) -> Tensor:
        return output

    def forward(self, x: Tensor) -> Any:
        q, k, v = (
            f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        weights = self.weigh((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1))
        return self.finish(self.out((weights @ v).transpose(1, 2).flatten(2)))


class DropsWeights(Plain):
    def weigh(self, weights: Tensor) -> Tensor:
        return self.drop(weights)  # type: ignore[no-any-return]  # of nn.Module
