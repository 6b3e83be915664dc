import math

import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, n_heads: int, d_embed: int, in_proj_bias=True, out_proj_bias=True):
        super().__init__()
        self.in_proj = nn.Linear(d_embed, 3 * d_embed, bias=in_proj_bias)
        self.out_proj = nn.Linear(d_embed, d_embed, bias=out_proj_bias)
        self.n_heads, self.d_head = n_heads, d_embed // n_heads

    def forward(self, x: torch.Tensor, causal_mask=False) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, self.n_heads, self.d_head).transpose(1, 2)
            for part in self.in_proj(x).chunk(3, dim=-1)
        )
        weight = q @ k.transpose(-1, -2)
        if causal_mask:
            later = torch.ones_like(weight, dtype=torch.bool).triu(1)
            weight.masked_fill_(later, -torch.inf)
        weight = (weight / math.sqrt(self.d_head)).softmax(dim=-1)
        return self.out_proj((weight @ v).transpose(1, 2).reshape(x.shape))
