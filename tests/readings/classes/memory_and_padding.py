"""tgt, memory and the padding of the memory, as in decoders of DETR and others."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class CrossAttention(nn.Module):
    def __init__(self, dim, nheads, dropout=0.0, bias=True):
        super().__init__()
        self.nheads = nheads
        self.in_proj = nn.Linear(dim, 3 * dim, bias=bias)
        self.out_proj = nn.Linear(dim, dim, bias=bias)
        self.drop = nn.Dropout(dropout)

    def project(self, x, part):
        weight, bias = self.in_proj.weight.chunk(3)[part], self.in_proj.bias
        bias = None if bias is None else bias.chunk(3)[part]
        return F.linear(x, weight, bias).unflatten(-1, (self.nheads, -1)).transpose(1, 2)

    def forward(self, tgt, memory, memory_key_padding_mask=None):
        q, k, v = self.project(tgt, 0), self.project(memory, 1), self.project(memory, 2)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if memory_key_padding_mask is not None:
            scores = scores.masked_fill(memory_key_padding_mask[:, None, None], -torch.inf)
        return self.out_proj((self.drop(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2))
