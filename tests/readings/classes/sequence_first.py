from typing import Optional

import torch
from torch import nn


class PrepareHeads(nn.Module):
    """Linear map, then the last dimension cut into heads."""

    def __init__(self, d_model: int, heads: int, d_k: int, bias: bool):
        super().__init__()
        self.linear = nn.Linear(d_model, heads * d_k, bias=bias)
        self.heads, self.d_k = heads, d_k

    def forward(self, x: torch.Tensor):
        return self.linear(x).view(*x.shape[:-1], self.heads, self.d_k)


class MultiHeadAttention(nn.Module):
    def __init__(self, heads: int, d_model: int, dropout_prob: float = 0.1, bias: bool = True):
        super().__init__()
        self.d_k = d_model // heads
        self.heads = heads
        self.query = PrepareHeads(d_model, heads, self.d_k, bias=bias)
        self.key = PrepareHeads(d_model, heads, self.d_k, bias=bias)
        self.value = PrepareHeads(d_model, heads, self.d_k, bias=True)
        self.softmax = nn.Softmax(dim=1)
        self.output = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout_prob)

    def forward(
        self, *, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Optional[torch.Tensor] = None
    ):
        # everything is [seq_len, batch_size, d_model]; mask is [seq_len_q, seq_len_k, batch_size]
        seq_len, batch_size, _ = query.shape
        query, key, value = self.query(query), self.key(key), self.value(value)

        scores = torch.einsum("ibhd,jbhd->ijbh", query, key) * self.d_k**-0.5
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(-1) == 0, float("-inf"))

        attn = self.dropout(self.softmax(scores))
        x = torch.einsum("ijbh,jbhd->ibhd", attn, value)
        return self.output(x.reshape(seq_len, batch_size, -1))
