import torch
from torch import nn, einsum
from einops import rearrange


def exists(val):
    return val is not None


class CrossAttention(nn.Module):
    def __init__(self, query_dim, context_dim=None, heads=8, dim_head=64, dropout=0.0):
        super().__init__()
        inner_dim = dim_head * heads
        context_dim = context_dim if exists(context_dim) else query_dim

        self.scale = dim_head**-0.5
        self.heads = heads

        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_kv = nn.Linear(context_dim, inner_dim * 2, bias=False)

        self.dropout = nn.Dropout(dropout)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, query_dim), nn.Dropout(dropout))

    def forward(self, x, context=None, mask=None):
        h = self.heads
        context = context if exists(context) else x

        q = rearrange(self.to_q(x), "b n (h d) -> b h n d", h=h)
        # keys and values of one head lie next to each other
        k, v = rearrange(self.to_kv(context), "b m (h two d) -> two b h m d", h=h, two=2)

        sim = einsum("b h i d, b h j d -> b h i j", q, k) * self.scale

        if exists(mask):
            mask = rearrange(mask, "b j -> b 1 1 j")
            max_neg_value = -torch.finfo(sim.dtype).max
            sim.masked_fill_(~mask, max_neg_value)

        attn = self.dropout(sim.softmax(dim=-1))

        out = einsum("b h i j, b h j d -> b h i d", attn, v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))
