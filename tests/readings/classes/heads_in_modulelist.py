import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


class AttentionHead(nn.Module):
    def __init__(self, d_model: int, head_dim: int):
        super().__init__()
        self.q = nn.Linear(d_model, head_dim)
        self.k = nn.Linear(d_model, head_dim)
        self.v = nn.Linear(d_model, head_dim)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask=None) -> Tensor:
        q, k, v = self.q(query), self.k(key), self.v(value)
        scores = torch.bmm(q, k.transpose(1, 2)) / (q.size(-1) ** 0.5)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        return torch.bmm(F.softmax(scores, dim=-1), v)


class MultiHead(nn.Module):
    def __init__(self, emb_dim: int, heads: int):
        super().__init__()
        head_dim = emb_dim // heads
        self.heads = nn.ModuleList([AttentionHead(emb_dim, head_dim) for _ in range(heads)])
        self.output_linear = nn.Linear(heads * head_dim, emb_dim)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask=None) -> Tensor:
        x = torch.cat([head(query, key, value, mask) for head in self.heads], dim=-1)
        return self.output_linear(x)
