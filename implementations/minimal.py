"""The shortest complete multi-head attention: four projections, a mask, the output."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mha.implementations.adapters.module import from_module
from mha.spec import Claims, Config, Rounding, validate_call
from mha.spec.claims import COMPOSITIONS, COMPUTE_DTYPES


class MinimalAttention(nn.Module):
    """Equation 1 and section 3.2.2 of Vaswani et al. 2017, and nothing else."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.config = Config(d_model, n_heads, bias=bias)
        self.config.validate()
        self.q = nn.Linear(d_model, d_model, bias=bias)
        self.k = nn.Linear(d_model, d_model, bias=bias)
        self.v = nn.Linear(d_model, d_model, bias=bias)
        self.o = nn.Linear(d_model, d_model, bias=bias)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Return the output (B, L, D).

        query: (B, L, D); key, value: (B, S, D); mask: boolean, broadcastable to (B, H, L, S), True
        = may attend.
        """
        validate_call(self.config, query, key, value, mask, masks=("bool",))
        heads = self.config.n_heads, self.config.head_dim
        q = self.q(query).unflatten(-1, heads).transpose(1, 2)
        k = self.k(key).unflatten(-1, heads).transpose(1, 2)
        v = self.v(value).unflatten(-1, heads).transpose(1, 2)
        scores = q @ k.mT / self.config.head_dim**0.5
        allowed = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
        # A row without an allowed key keeps its scores in the softmax, which would be NaN if all
        # were -infinity.
        empty = ~allowed.any(-1, keepdim=True)
        scores = scores.masked_fill(~(allowed | empty), float("-inf"))
        weights = scores.softmax(-1).masked_fill(~allowed, 0.0)
        output: Tensor = self.o((weights @ v).transpose(1, 2).flatten(2))
        return output


implementation = from_module(
    MinimalAttention,
    name="minimal",
    parameters={"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "o"},
    mask="keep",
    claims=Claims(
        returns_weights=False,
        second_gradients=True,
        composes=COMPOSITIONS,
        dtypes=COMPUTE_DTYPES,
        rounding=Rounding(softmax_stored=False, log_normaliser=False, rescales=0),
    ),
)
