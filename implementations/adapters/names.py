"""The names that people give the parameters of an attention's call, by what they mean."""

from __future__ import annotations

import re
from types import CodeType, SimpleNamespace

from mha.spec.option_names import (
    CHUNK_NAMES,
    RETURN_LSE_NAMES,
    SCALE_NAMES,
    SINK_NAMES,
    SLOPES_NAMES,
    SOFTCAP_NAMES,
    WINDOW_NAMES,
    WINDOW_PAIRS,
    listed,
)

# The names under which functions take each input and each option; a function has at most one of
# them.
INPUT_NAMES = {
    "query": ("query", "queries", "q", "Q", "x_q", "q_in", "inputs_q"),
    "key": ("key", "keys", "k", "K", "x_k", "k_in", "inputs_k"),
    "value": ("value", "values", "v", "V", "x_v", "v_in", "inputs_v"),
}
# One input for key and value.
MEMORY_NAMES = listed(
    """
    memory context kv key_value key_value_states encoder_hidden_states encoder_output
    encoder_outputs enc_output enc_outputs encoder_out enc_out mem y xa x_kv kv_input inputs_kv
    cond source src ctx c to_tensor kv_x memory_antecedent source_states encoder_states x2 x_2
    encoder_x encoder_state encoder_features encoder_input encoded encoder_hidden enc_x x_enc
    src_seq kv_seq kv_states other cond_emb image_features context_states context_emb K k key
    keys value values inputs
    """
)
KEY_MASK_NAMES = listed(
    """
    key_padding_mask padding_mask pad_mask src_key_padding_mask memory_key_padding_mask key_mask
    context_mask memory_mask encoder_padding_mask kv_mask y_mask valid_mask key_pad_mask
    src_padding_mask kv_padding_mask k_mask padding key_padding is_padding is_pad
    """
)
# The words of a memory, and of a mask for one beside another that is for self-attention.
MEMORY_WORDS = {"encoder", "enc", "memory", "mem", "cross", "context", "src", "source", "kv"}
# Those of what else is about a memory.
NO_MEMORY_WORDS = frozenset(
    listed(
        "cache past len lens length lengths seqlens pos position positions ids bias mask heads size"
        " dropout weight weights layer state fn key value rotary rope freqs cos sin norm token"
        " tokens type types index idx dim scale"
    )
)
QUERY_WORDS = {"query", "queries", "q", "decoder", "dec", "tgt", "trg", "target"}
MASK_WORDS = frozenset({"mask", "adj", "adjacency"})
# Names of masks that say which keys a query sees.
SEEN_NAMES = listed("keep allowed allow visible visibility may_attend can_attend")
# Of what hides heads, or queries.
OTHER_MASKS = listed("head_mask layer_head_mask cross_attn_head_mask q_mask query_mask")
# The annotations of what is no tensor.
NUMBERS = listed("bool int float str")
# Of what is added to the scores.
BIAS_NAMES = listed("attn_bias attention_bias additive_attention_mask bias")
# Flags only where the default is one: others of these names are masks.
FLAGS = ("causal_mask", "use_causal_mask")
# Of kernels: functions of scores and places, blocks, and bits of bytes, which no mask becomes.
NO_TENSOR_MASKS = listed("mask_mod block_mask block_mask_mod packed_custom_mask")
# What makes kernels keep their bits, and the claim under which that is judged.
OF_BITS = {
    "deterministic": 'repeats="both" of functools.partial({kernel}, deterministic=True)',
    "num_splits": 'batch_invariant={{"num_splits": 1}}',
    "disable_split_kv": 'batch_invariant={{"disable_split_kv": True}}',
}
# Of how many keys are no padding.
LENGTH_NAMES = listed(
    """
    valid_lens valid_len valid_lengths valid_length lengths lens seq_lens seq_lengths
    key_lengths key_lens kv_lengths kv_lens src_lengths src_lens memory_lengths x_lens
    """
)
# Of how many keys, and queries, each item of a dense batch has, which places count from.
KEY_LENGTHS_NAMES = listed(
    """
    cache_seqlens seqused_k key_value_seq_lengths nonpad_kv_seqlen seq_len_kv seqlens_k
    """
)
QUERY_LENGTHS_NAMES = listed("seqused_q query_seq_lengths seq_len_q")
# These are of 64 bits, others of 32.
WIDE_LENGTHS = ("nonpad_kv_seqlen",)
# What switches on slopes that are built in: flags, or one that takes a word.
SLOPES_SWITCHES = listed("use_alibi_mask use_alibi alibi pos_encoding_mode")
SLOPES_BY_WORD = {"pos_encoding_mode": "ALIBI"}
OPTION_NAMES = {
    "mask": (
        *listed("attn_mask attention_mask mask src_mask tgt_mask masks"),
        *KEY_MASK_NAMES,
        *BIAS_NAMES,
        *LENGTH_NAMES,
    ),
    "is_causal": ("is_causal", "causal", "use_causal", *FLAGS),
    "need_weights": listed(
        """
        need_weights return_weights output_attentions return_attention return_attn
        output_attention return_attn_weights return_attention_weights return_attention_scores
        return_attentions
        """
    ),
    "average": ("average_attn_weights", "average_weights"),
    # What has to be said where there are fewer key heads.
    "grouped": ("enable_gqa",),
    "scale": SCALE_NAMES,
    "softcap": SOFTCAP_NAMES,
    "sinks": SINK_NAMES,
    "alibi": SLOPES_NAMES,
    "chunk": CHUNK_NAMES,
    "alibi_switch": SLOPES_SWITCHES,
    "key_lengths": KEY_LENGTHS_NAMES,
    "query_lengths": QUERY_LENGTHS_NAMES,
    "return_lse": RETURN_LSE_NAMES,
}
# Of a mask of keys, beside another one; the last two only if no other name of padding is there.
PADDING_NAMES = (*KEY_MASK_NAMES, "mask", "attention_mask")
DESTINATION_NAMES = ("out", "output", "o")
# What a function is given where it has no default, and what says the same as the contract. The
# others get None.
NEUTRAL_NAMES = {
    "scale": SCALE_NAMES,
    "dropout": ("dropout", "dropout_p", "p_dropout", "dropout_rate"),
    "n_heads": ("num_heads", "n_heads", "heads", "n_head", "nhead", "q_num_heads"),
    "kv_heads": ("kv_num_heads", "num_kv_heads", "n_kv_heads", "num_key_value_heads"),
    # How many query heads share a key head; `num_groups` is elsewhere how many key heads there are.
    "groups": ("n_rep", "num_key_value_groups", "q_per_kv", "group_size"),
    "module": ("module",),
    # Of what is decoded from its beginning, without rotary positions.
    "start": ("start_pos", "start"),
    "positions": ("freqs", "input_pos", "rotary_emb"),
    # Of a rotation in complex numbers; None without one.
    "complex": ("freqs_cis",),
    # Of positions, whose rotation by 0 is none.
    "places": ("position_ids", "positions", "position_id", "pos_ids"),
    # Of a rotation, which may be a pair.
    "cosines": ("cos", "freqs_cos"),
    "sines": ("sin", "freqs_sin"),
    "rotation": ("position_embeddings", "cos_sin", "rotary_pos_emb"),
    # Of a rotation, sines before cosines, which no call requires.
    "table": ("rope",),
    "cache": ("kv_cache",),
    "batch": ("batch_size", "bsz"),
    # Of a tensor that the context is written to; NaN before.
    "destination": DESTINATION_NAMES,
    # None for none.
    "window": ("window_size", "sliding_window", "window"),
    "tile": listed(
        """
        block_size tile_size chunk_size block tile Br Bc BLOCK_M BLOCK_N block_q block_k
        """
    ),
    # An image of one column has as many rows as there are positions.
    "rows": ("H", "h", "height"),
    "columns": ("W", "w", "width"),
}
# What functions for transformers read from the module that they are given.
MODULE = SimpleNamespace(training=False, num_key_value_groups=1, is_causal=False, layer_idx=0)
# Of a rotation for each position and pair of columns, (L, d_k / 2), if need be; the first one in
# complex numbers.
PAIRED = frozenset({"freqs_cis", "freqs_cos", "freqs_sin"})
NEUTRAL_MEANING = {name: meaning for meaning, names in NEUTRAL_NAMES.items() for name in names}
KNOWN_OPTIONS = {*PADDING_NAMES, *WINDOW_NAMES}.union(*OPTION_NAMES.values(), *WINDOW_PAIRS)


def words_of(name: str) -> list[str]:
    """Split a dotted name at dots, underscores, digits and capitals: W_query, toQKV, cAttn."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def is_option(name: str) -> bool:
    """Return whether a parameter of a call is a mask, or another known option, by its name.

    >>> is_option("look_ahead_mask"), is_option("context")
    (True, False)
    """
    return name in KNOWN_OPTIONS or is_called_mask(name)


def is_called_mask(name: str) -> bool:
    """Return whether a name is that of a mask by its words: a graph's adjacency is one.

    >>> is_called_mask("q_mask"), is_called_mask("adj"), is_called_mask("masked")
    (True, True, False)
    >>> is_called_mask("allowed"), is_called_mask("keep_prob")
    (True, False)
    """
    return name in SEEN_NAMES or not MASK_WORDS.isdisjoint(words_of(name))


def is_causal_flag(name: str, default: object) -> bool:
    """Return whether a parameter is a causal flag, by its default and the words of its name.

    >>> is_causal_flag("apply_causal_mask", False), is_causal_flag("masked", False)
    (True, False)
    >>> is_causal_flag("causal_mask", None)
    False
    """
    words = {*words_of(name)}
    is_negated = not words.isdisjoint(("no", "non", "not"))
    is_of_model = "lm" in words  # a causal language model
    return isinstance(default, bool) and "causal" in words and not is_negated and not is_of_model


def names_used(cls: type, *, bases: bool = True) -> set[str]:
    """Return the names of variables and attributes that the methods of a class use.

    bases: whether those of its bases are looked at too.

    >>> class Split:
    ...     def split(self, name):
    ...         return name.partition(".")
    >>> "partition" in names_used(Split)
    True
    """
    names: set[str] = set()
    for each in cls.__mro__ if bases else (cls,):
        for member in vars(each).values():
            names |= _names_in(getattr(member, "__code__", None))
    return names


def _names_in(code: object) -> set[str]:
    """Return the names of variables and attributes in a code, and in the functions within it."""
    if not isinstance(code, CodeType):
        return set()
    names = {*code.co_names}
    for constant in code.co_consts:
        names |= _names_in(constant)
    return names
