from typing import Optional

import torch
from torch import Tensor, nn


class EinsumAttention(nn.Module):
    IGNORE = -1e5

    def __init__(self, d_model: int, n_heads: int, d_head: int, causal: bool = False, init_range: float = 0.02):
        super().__init__()
        self.d_head = d_head
        self.causal = causal
        self.W_Q = nn.Parameter(torch.empty(d_model, n_heads, d_head))
        self.W_K = nn.Parameter(torch.empty(d_model, n_heads, d_head))
        self.W_V = nn.Parameter(torch.empty(d_model, n_heads, d_head))
        self.W_O = nn.Parameter(torch.empty(n_heads, d_head, d_model))
        self.b_O = nn.Parameter(torch.zeros(d_model))
        for w in (self.W_Q, self.W_K, self.W_V, self.W_O):
            nn.init.normal_(w, std=init_range)

    def forward(self, resid: Tensor, memory: Optional[Tensor] = None) -> Tensor:
        """resid: [batch, q_pos, d_model], memory: [batch, k_pos, d_model]"""
        src = resid if memory is None else memory
        q = torch.einsum("bqm,mhd->bqhd", resid, self.W_Q)
        k = torch.einsum("bkm,mhd->bkhd", src, self.W_K)
        v = torch.einsum("bkm,mhd->bkhd", src, self.W_V)

        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / self.d_head**0.5
        if self.causal:
            ones = torch.ones(scores.size(-2), scores.size(-1), device=scores.device)
            scores = scores.masked_fill(torch.triu(ones, diagonal=1).bool(), self.IGNORE)
        pattern = scores.softmax(dim=-1)

        z = torch.einsum("bhqk,bkhd->bqhd", pattern, v)
        return torch.einsum("bqhd,hdm->bqm", z, self.W_O) + self.b_O
