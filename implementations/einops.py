"""Every axis has a name: `rearrange` of einops splits and merges the heads, `einsum` multiplies."""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor, nn

from mha.implementations.adapters.module import from_module
from mha.spec import Claims, Config, Output, Rounding, validate_call
from mha.spec.claims import COMPOSITIONS, COMPUTE_DTYPES


class EinopsAttention(nn.Module):
    """Equation 1 and section 3.2.2 of Vaswani et al. 2017; a mask says which keys are hidden."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.config = Config(d_model, n_heads, bias=bias)
        self.config.validate()
        self.to_q = nn.Linear(d_model, d_model, bias=bias)
        self.to_k = nn.Linear(d_model, d_model, bias=bias)
        self.to_v = nn.Linear(d_model, d_model, bias=bias)
        self.to_out = nn.Linear(d_model, d_model, bias=bias)
        self.scale = self.config.head_dim**-0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Output:
        """Return the output (B, L, D) and the weights (B, H, L, S).

        query: (B, L, D); key, value: (B, S, D); mask: boolean, broadcastable to (B, H, L, S), True
        = hidden.
        """
        validate_call(self.config, query, key, value, mask, masks=("bool",))
        width = self.config.head_dim
        q = rearrange(self.to_q(query), "b n (h d) -> b h n d", d=width)
        k = rearrange(self.to_k(key), "b n (h d) -> b h n d", d=width)
        v = rearrange(self.to_v(value), "b n (h d) -> b h n d", d=width)
        scores = einsum(q, k, "b h i d, b h j d -> b h i j") * self.scale
        hidden = torch.zeros_like(scores, dtype=torch.bool) if mask is None else mask
        # A row whose keys are all hidden keeps its scores in the softmax, which would be NaN if all
        # were -infinity.
        empty = hidden.all(-1, keepdim=True)
        scores = scores.masked_fill(hidden & ~empty, float("-inf"))
        weights = scores.softmax(-1).masked_fill(hidden, 0.0)
        context = einsum(weights, v, "b h i j, b h j d -> b h i d")
        return Output(self.to_out(rearrange(context, "b h n d -> b n (h d)")), weights)


implementation = from_module(
    EinopsAttention,
    name="einops",
    parameters={"w_q": "to_q", "w_k": "to_k", "w_v": "to_v", "w_o": "to_out"},
    mask="drop",
    claims=Claims(
        second_gradients=True,
        composes=COMPOSITIONS,
        dtypes=COMPUTE_DTYPES,
        rounding=Rounding(softmax_stored=False, log_normaliser=False, rescales=0),
    ),
)
