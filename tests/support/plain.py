"""A right class of self-attention whose steps other tests change."""

from __future__ import annotations

from torch import Tensor, nn


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
