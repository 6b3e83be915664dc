import torch
import torch.nn as nn


class MultiHeadSelfAttention(nn.Module):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        assert d_out % num_heads == 0, "num_heads must divide d_out"
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads

        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout = nn.Dropout(dropout)
        future = torch.ones(context_length, context_length).triu(1).bool()
        self.register_buffer("mask", future, persistent=False)

    def forward(self, x):
        b, n_tokens, _ = x.shape

        def heads(t):
            return t.view(b, n_tokens, self.num_heads, self.head_dim).transpose(1, 2)

        queries = heads(self.W_query(x))
        keys = heads(self.W_key(x))
        values = heads(self.W_value(x))

        attn_scores = queries @ keys.mT
        attn_scores.masked_fill_(self.mask[:n_tokens, :n_tokens], -torch.inf)
        attn_weights = self.dropout(torch.softmax(attn_scores, dim=-1))

        context = attn_weights @ values
        return context.transpose(1, 2).flatten(2)
