import math
from typing import Optional

import torch
from torch import nn


class ConvAttention(nn.Module):
    """Of channels (b, c, t), as in text-to-speech; the projections are convolutions of width 1."""

    def __init__(self, channels, n_heads, p_dropout=0.0):
        super().__init__()
        assert channels % n_heads == 0
        self.n_heads, self.p = n_heads, p_dropout
        self.conv_q = nn.Conv1d(channels, channels, 1)
        self.conv_kv = nn.Conv1d(channels, 2 * channels, kernel_size=1)
        self.conv_o = nn.Conv1d(channels, channels, 1)

    def forward(self, x: torch.Tensor, c: torch.Tensor, attn_mask: Optional[torch.Tensor] = None):
        q = self.conv_q(x).unflatten(1, (self.n_heads, -1))
        k, v = self.conv_kv(c).unflatten(1, (self.n_heads, -1)).chunk(2, dim=2)  # each head has its key and value
        scores = torch.einsum("bhdt,bhds->bhts", q / math.sqrt(q.shape[2]), k)
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask == 0, torch.finfo(scores.dtype).min)
        weights = nn.functional.dropout(scores.softmax(-1), self.p, self.training)
        return self.conv_o(torch.einsum("bhts,bhds->bhdt", weights, v).flatten(1, 2))
