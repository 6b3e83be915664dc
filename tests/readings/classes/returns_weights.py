import torch
from torch import nn


class ScaledDotProductAttention(nn.Module):
    def __init__(self, temperature, attn_dropout=0.1):
        super().__init__()
        self.temperature = temperature
        self.dropout = nn.Dropout(attn_dropout)

    def forward(self, q, k, v, mask=None):
        attn = torch.matmul(q / self.temperature, k.transpose(2, 3))
        if mask is not None:
            attn = attn.masked_fill(mask, float("-inf"))
        attn = self.dropout(attn.softmax(dim=-1))
        return torch.matmul(attn, v), attn


class MultiHeadAttn(nn.Module):
    def __init__(self, n_head, d_model, d_k, d_v, dropout=0.1):
        """
        :param n_head: number of heads
        :param d_model: width of the model
        :param d_k: width of queries and keys, per head
        :param d_v: width of values, per head
        """
        super().__init__()
        self.n_head, self.d_k, self.d_v = n_head, d_k, d_v

        self.fc_q = nn.Linear(d_model, n_head * d_k)
        self.fc_k = nn.Linear(d_model, n_head * d_k)
        self.fc_v = nn.Linear(d_model, n_head * d_v)
        self.fc_o = nn.Linear(n_head * d_v, d_model)
        self.attention = ScaledDotProductAttention(temperature=d_k**0.5, attn_dropout=dropout)

    def forward(self, queries, keys, values, mask=None):
        bs, nq = queries.shape[:2]
        nk = keys.shape[1]

        q = self.fc_q(queries).view(bs, nq, self.n_head, self.d_k).permute(0, 2, 1, 3)
        k = self.fc_k(keys).view(bs, nk, self.n_head, self.d_k).permute(0, 2, 1, 3)
        v = self.fc_v(values).view(bs, nk, self.n_head, self.d_v).permute(0, 2, 1, 3)

        # mask: True = do not look at this position
        out, attn = self.attention(q, k, v, mask=mask)
        out = out.permute(0, 2, 1, 3).reshape(bs, nq, self.n_head * self.d_v)
        return self.fc_o(out), attn
