"""A config class of its own, and outputs in a dict, the weights first."""

import math
from dataclasses import dataclass

from torch import nn


@dataclass
class EncoderConfig:
    vocabulary: int = 1000
    hidden_size: int = 64
    num_attention_heads: int = 4
    attention_probs_dropout_prob: float = 0.1
    hidden_dropout_prob: float = 0.1


class SelfAttention(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        assert config.vocabulary == 1000
        self.n_heads, size = config.num_attention_heads, config.hidden_size
        self.query, self.key, self.value, self.dense = (nn.Linear(size, size) for _ in range(4))
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)
        self.hidden_dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states, attention_mask=None):
        q, k, v = (
            layer(hidden_states).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = scores.softmax(-1)
        context = (self.dropout(weights) @ v).transpose(1, 2).flatten(2)
        return {"attentions": weights, "hidden_states": self.hidden_dropout(self.dense(context))}
