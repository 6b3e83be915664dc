import torch
import torch.nn.functional as F
from torch import nn


class MultiQueryAttention(nn.Module):
    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if d_model % n_heads != 0:
            raise ValueError(f"d_model ({d_model}) must be divisible by n_heads ({n_heads})")
        self.n_heads, self.head_dim, self.dropout = n_heads, d_model // n_heads, dropout
        self.q_proj = nn.Linear(d_model, d_model)
        self.kv_proj = nn.Linear(d_model, 2 * self.head_dim)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor, is_causal: bool = False) -> torch.Tensor:
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        k, v = self.kv_proj(x).split(self.head_dim, dim=-1)
        scores = q @ k.unsqueeze(1).transpose(-2, -1) / self.head_dim**0.5
        if is_causal:
            future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.out_proj((weights @ v.unsqueeze(1)).transpose(1, 2).reshape(B, T, C))
