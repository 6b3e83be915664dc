"""The words of a class: what its parameters, layers and inputs are called."""

from __future__ import annotations

from typing import NamedTuple

from lattice.axes import Point


class Words(NamedTuple):
    """The names of constructor parameters."""

    d_model: str
    n_heads: str
    head_dim: str = "head_dim"
    n_kv_heads: str = "n_kv_heads"
    bias: str = "bias"
    dropout: str = "dropout"
    max_length: str = "max_len"


WORDS = {
    "d_model": Words("d_model", "n_heads", "d_head"),
    "embed_dim": Words("embed_dim", "num_heads", n_kv_heads="num_kv_heads", dropout="attn_dropout"),
    "dim": Words("dim", "heads", "dim_head", bias="qkv_bias", max_length="max_seq_len"),
    "hidden_size": Words(
        "hidden_size", "num_attention_heads", n_kv_heads="num_kv_heads", dropout="dropout_prob"
    ),
    "n_embd": Words("n_embd", "n_head", dropout="attn_pdrop", max_length="block_size"),
    "h_d_model": Words("d_model", "h"),
    "config": Words("n_embd", "n_head", max_length="block_size"),
    "hf_config": Words(
        "hidden_size",
        "num_attention_heads",
        dropout="attention_probs_dropout_prob",
        max_length="max_position_embeddings",
    ),
}
# The layers of query, key, value and output.
LAYER_NAMES = {
    "q_proj": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "W_q": ("W_q", "W_k", "W_v", "W_o"),
    "to_q": ("to_q", "to_k", "to_v", "to_out"),
    "query": ("query", "key", "value", "dense"),
}
# The names in `forward` of query, key and value.
INPUT_NAMES = {
    "x": ("x", "x", "x"),
    "hidden_states": ("hidden_states",) * 3,
    "query_key_value": ("query", "key", "value"),
    "q_k_v": ("q", "k", "v"),
    "value_key_query": ("queries", "keys", "values"),
    "query_key_default": ("query", "key", "value"),
    "x_context": ("x", "context", "context"),
    "x_memory": ("x", "memory", "memory"),
}
MASK_NAMES = {
    "broadcast": "mask",
    "rank 4": "attention_mask",
    "b s": "key_padding_mask",
    "l s": "attn_mask",
    "b l s": "attn_mask",
    "b 1 1 s": "attention_mask",
    "b 1 l s": "mask",
    "(b h) l s": "attn_mask",
    "b h l s": "attention_mask",
    "l s b": "mask",
}


def words_of(point: Point) -> Words:
    """Return the names of the constructor parameters of a point."""
    return WORDS[point.words]


def mask_name(point: Point) -> str:
    """Return the name of the mask in `forward`."""
    if point.padding != "none":
        return "attn_mask"
    return MASK_NAMES[point.shape]


def padding_name(point: Point) -> str:
    """Return the name of the padding mask in `forward`."""
    return "key_padding_mask" if point.mask != "none" else "padding_mask"
