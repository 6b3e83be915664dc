"""Self-attention as in language models: one projection for query, key and value, and SDPA."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha.implementations.adapters.module import from_module
from mha.spec import Claims, Config, Rounding, validate_call
from mha.spec.claims import COMPUTE_DTYPES


class FusedAttention(nn.Module):
    """Equation 1 of Vaswani et al. 2017 over one sequence.

    W_q, W_k and W_v are stacked in one matrix (3 D, D), and `scaled_dot_product_attention` attends.
    """

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.config = Config(d_model, n_heads, bias=bias)
        self.config.validate()
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=bias)
        self.out = nn.Linear(d_model, d_model, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return the output (B, L, D).

        x: (B, L, D); mask: boolean, broadcastable to (B, H, L, L), True = hidden; for padding
        (B, L), padding[:, None, None].
        """
        validate_call(self.config, x, x, x, mask, masks=("bool",))
        parts = self.qkv(x).unflatten(-1, (3, self.config.n_heads, self.config.head_dim))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        if mask is not None and is_causal:  # some backends reject a mask together with is_causal
            length = x.shape[1]
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            mask = mask | later
        allowed = None if mask is None else ~torch.atleast_2d(mask)
        context = F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, is_causal=is_causal and mask is None
        )
        output: Tensor = self.out(context.transpose(1, 2).flatten(2))
        return output


implementation = from_module(
    FusedAttention,
    name="fused_qkv",
    parameters={"w_qkv": "qkv", "w_o": "out"},
    mask="drop",
    claims=Claims(
        cross_attention=False,
        returns_weights=False,
        composes={"compile", "func", "autocast"},
        dtypes=COMPUTE_DTYPES,
        rounding=Rounding(softmax_stored=False, log_normaliser=False, rescales=0),
    ),
)
