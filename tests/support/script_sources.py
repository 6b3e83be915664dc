"""Right classes and functions; `test_scripts_alone` puts faults into them."""

# What most faults are put into: query, key and value, a mask of True = may attend, a flag, weights.
PLAIN = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(
        self, d_model, n_heads, dropout=0.0, n_kv_heads=None, kdim=None, vdim=None, bias=True
    ):
        super().__init__()
        if n_heads < 1 or d_model < 1 or d_model % n_heads:
            raise ValueError(f"{d_model} is not a multiple of {n_heads}")
        self.n_heads, self.kv_heads = n_heads, n_kv_heads or n_heads
        kv_width = self.kv_heads * (d_model // n_heads)
        self.q_proj = nn.Linear(d_model, d_model, bias=bias)
        self.k_proj = nn.Linear(kdim or d_model, kv_width, bias=bias)
        self.v_proj = nn.Linear(vdim or d_model, kv_width, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, value, mask=None, is_causal=False, need_weights=False):
        def split(x, heads):
            return x.unflatten(-1, (heads, -1)).transpose(1, 2)

        q = split(self.q_proj(query), self.n_heads)
        k, v = split(self.k_proj(key), self.kv_heads), split(self.v_proj(value), self.kv_heads)
        k, v = (x.repeat_interleave(self.n_heads // self.kv_heads, 1) for x in (k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            fits = torch.broadcast_shapes(mask.shape, scores.shape) == scores.shape
            if mask.dtype != torch.bool or not fits:
                raise ValueError(f"a mask of {mask.dtype}, {tuple(mask.shape)}")
            scores = scores.masked_fill(~mask, float("-inf"))
        if is_causal:
            after = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(after, float("-inf"))
        weights = scores.softmax(-1).nan_to_num()
        context = (self.dropout(weights) @ v).transpose(1, 2).flatten(2)
        output = self.out_proj(context)
        return output, weights
"""
FUSED = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, num_heads=8, qkv_bias=True):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=qkv_bias), nn.Linear(dim, dim)

    def forward(self, x, attn_mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask, float("-inf"))  # True = may not attend
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""
SEQUENCE_FIRST = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, heads, d_model, dropout_prob=0.1):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.dropout = nn.Dropout(dropout_prob)

    def forward(self, *, query, key, value, key_padding_mask=None):
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3)
            for layer, x in ((self.q, query), (self.k, key), (self.v, value))
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None] == 0, float("-inf"))
        return self.o((self.dropout(scores.softmax(-1)) @ v).permute(2, 0, 1, 3).flatten(2))
"""
CONFIG = """
from dataclasses import dataclass

from torch import nn


@dataclass
class EncoderConfig:
    vocabulary: int = 1000
    hidden_size: int = 64
    num_attention_heads: int = 4


class Attention(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.n_heads, size = config.num_attention_heads, config.hidden_size
        self.query, self.key, self.value, self.dense = (nn.Linear(size, size) for _ in range(4))

    def forward(self, hidden_states, attention_mask=None):
        q, k, v = (
            layer(hidden_states).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = scores.softmax(-1)
        context = (weights @ v).transpose(1, 2).flatten(2)
        return {"attentions": weights, "hidden_states": self.dense(context)}
"""
ANY_CONFIG = CONFIG.replace("config: EncoderConfig", "config").replace(
    "@dataclass\nclass EncoderConfig", "class Unused"
)
HEADS = """
import torch
from torch import nn


class Head(nn.Module):
    def __init__(self, width, head_dim):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, head_dim) for _ in range(3))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.heads = nn.ModuleList(Head(d_model, d_model // n_heads) for _ in range(n_heads))
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.out(torch.cat([head(x) for head in self.heads], -1))
"""
KERNEL = """
import torch


def attend(q, k, v, attn_mask=None):
    scores = torch.einsum("blhd,bshd->bhls", q, k) / q.shape[-1] ** 0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    return torch.einsum("bhls,bshd->blhd", scores.softmax(-1), v)
"""
HEAD_KERNEL = """
def attend(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
"""
PACKED_KERNEL = """
def attend(qkv):
    q, k, v = qkv.unbind(2)
    weights = (q.transpose(1, 2) @ k.transpose(1, 2).mT / q.shape[-1] ** 0.5).softmax(-1)
    return (weights @ v.transpose(1, 2)).transpose(1, 2)
"""
