"""Raw classes that inference refuses, each by a function or class that leaves plain attention."""

import os

from torch import nn


def vit(d_model, n_heads, head_dim, dropout):
    """vit-pytorch normalises the input inside, which is switched off."""
    from vit_pytorch.vit import Attention

    module = Attention(d_model, n_heads, head_dim, dropout)
    module.norm = nn.Identity()
    return module


def cross_vit(d_model, n_heads, head_dim, dropout):
    """As in `vit`."""
    from vit_pytorch.cross_vit import Attention

    module = Attention(d_model, n_heads, head_dim, dropout)
    module.norm = nn.Identity()
    return module


def whisper(d_model, n_heads):
    """With its flag for sdpa, any mask means a causal one; else it is added, and cut to (L, L)."""
    from whisper.model import MultiHeadAttention

    class Attention(MultiHeadAttention):
        use_sdpa = False

        def forward(self, x, mask=None):
            return super().forward(x, mask=mask)[0]

    MultiHeadAttention.use_sdpa = False
    return Attention(d_model, n_heads)


def pyg(d_model, n_heads, dropout):
    """The attention in the block of torch_geometric, without norms, residual and feed-forward."""
    from torch_geometric.nn.aggr.utils import MultiheadAttentionBlock

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = MultiheadAttentionBlock(d_model, n_heads, dropout=dropout).attn

        def forward(self, x, y, y_mask=None):
            return self.block(
                x, y, y, None if y_mask is None else ~y_mask, average_attn_weights=False
            )

    return Attention()


def bert(d_model, n_heads, dropout):
    """Without the residual sum and the LayerNorm of the output."""
    from transformers.models.bert.modeling_bert import BertAttention, BertConfig

    class Attention(BertAttention):
        def forward(self, hidden_states, attention_mask=None):
            context, weights = self.self(hidden_states, attention_mask)
            return self.output.dense(context), weights

    sizes = {
        "hidden_size": d_model,
        "num_attention_heads": n_heads,
        "attention_probs_dropout_prob": dropout,
    }
    return Attention(BertConfig(**sizes))


def keras_attention(d_model, n_heads, head_dim, bias, dropout):
    """On the torch backend, with the order of its arguments and its own names of options."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = {"num_heads": n_heads, "key_dim": head_dim}
            self.layer = keras.layers.MultiHeadAttention(
                **sizes, dropout=dropout, use_bias=bias, name="attention"
            )
            self.layer.build((None, None, d_model), (None, None, d_model))

        def forward(self, query, key, value, mask=None, is_causal=False, need_weights=False):
            options = {"use_causal_mask": is_causal, "return_attention_scores": need_weights}
            return self.layer(
                query, value, key, attention_mask=mask, training=self.training, **options
            )

    return Attention()
