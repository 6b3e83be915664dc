"""num_hiddens, and valid lengths where others take a mask, as in d2l."""

import math

import torch
from torch import nn


def masked_softmax(scores, valid_lens):
    """Scores (B * H, L, S); valid_lens (B * H,) or None."""
    if valid_lens is not None:
        positions = torch.arange(scores.shape[-1], device=scores.device)
        scores = scores.masked_fill(positions >= valid_lens[:, None, None], -1e6)
    return scores.softmax(-1)


class MultiHeadAttention(nn.Module):
    def __init__(self, num_hiddens, num_heads, dropout, bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = nn.Dropout(dropout)
        self.W_q = nn.Linear(num_hiddens, num_hiddens, bias=bias)
        self.W_k = nn.Linear(num_hiddens, num_hiddens, bias=bias)
        self.W_v = nn.Linear(num_hiddens, num_hiddens, bias=bias)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=bias)

    def transpose_qkv(self, X):
        return X.unflatten(-1, (self.num_heads, -1)).permute(0, 2, 1, 3).flatten(0, 1)

    def forward(self, queries, keys, values, valid_lens):
        queries = self.transpose_qkv(self.W_q(queries))
        keys = self.transpose_qkv(self.W_k(keys))
        values = self.transpose_qkv(self.W_v(values))
        if valid_lens is not None:
            valid_lens = valid_lens.repeat_interleave(self.num_heads)
        weights = masked_softmax(queries @ keys.transpose(1, 2) / math.sqrt(queries.shape[-1]), valid_lens)
        output = self.dropout(weights) @ values
        return self.W_o(output.unflatten(0, (-1, self.num_heads)).permute(0, 2, 1, 3).flatten(2))
