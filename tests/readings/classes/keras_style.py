import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads, key_dim, dropout=0.0, use_bias=True):
        super().__init__()
        self.num_heads, self.key_dim = num_heads, key_dim
        self.query_dense = nn.Linear(d_model, num_heads * key_dim, bias=use_bias)
        self.key_dense = nn.Linear(d_model, num_heads * key_dim, bias=use_bias)
        self.value_dense = nn.Linear(d_model, num_heads * key_dim, bias=use_bias)
        self.output_dense = nn.Linear(num_heads * key_dim, d_model, bias=use_bias)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, query, value, key=None, attention_mask=None, return_attention_scores=False, use_causal_mask=False
    ):
        key = value if key is None else key
        query = self.query_dense(query).unflatten(-1, (self.num_heads, self.key_dim)) * self.key_dim**-0.5
        key = self.key_dense(key).unflatten(-1, (self.num_heads, self.key_dim))
        value = self.value_dense(value).unflatten(-1, (self.num_heads, self.key_dim))
        scores = torch.einsum("btnh,bsnh->bnts", query, key)
        if use_causal_mask:
            causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()[None]
            attention_mask = causal if attention_mask is None else attention_mask & causal
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask[:, None], torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        output = self.output_dense(torch.einsum("bnts,bsnh->btnh", self.dropout(weights), value).flatten(2))
        return (output, weights) if return_attention_scores else output
