"""What the parameters of a constructor mean, by their names."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from functools import partial
from itertools import combinations
from typing import Any

from mha.implementations.adapters.names import is_causal_flag, words_of
from mha.spec.option_names import listed

# What the root of stands in the place of that of d_k.
SCALARS = listed("query_pre_attn_scalar attention_scores_scalar")
# The names of constructor parameters, by what they are given: a field of Config, or what follows
# from the fields.
CONSTRUCTOR_NAMES: dict[str, tuple[str, ...]] = {
    meaning: listed(names)
    for meaning, names in {
        "d_model": """
            d_model embed_dim dim hidden_dim hidden_size embed_size emb_dim emb_size n_embd
            embedding_dim model_dim query_dim d_in d_out input_dim hid_dim n_state emb channels
            n_feat num_hiddens dim_q d embed_dims embedding_size in_dim in_features out_features
            dim_in dim_out out_dim input_size hidden_channels in_channels n_units query_size
            dim_model d_embed model_size feature_dim E_q E_total num_hid features num_features
            n_features qkv_features out_channels num_channels nx n_hidden hidden_units d_hidden
            dim_hidden attention_dim embed_dimension num_units c_q d_hid model_dimension dmodel
            feat_size d_token d_model_size depth_att dim_Q n_embed dim_embed dim_embedding ninp nhid
            units feature_size state_dim c_in in_planes d_embedding in_feats q_dim tgt_dim trg_dim
            decoder_dim dec_dim d_tgt d_dec d_decoder width
        """,
        "n_heads": """
            n_heads num_heads heads n_head nhead num_attention_heads head_count h nheads num_head
            attention_heads n_attention_heads attn_heads num_attn_heads nb_heads head_num heads_num
            no_heads num_of_heads number_of_heads n_attn_heads nb_head encoder_attention_heads
            decoder_attention_heads query_heads num_query_heads n_query_heads heads_count
            n_att_heads att_heads num_att_heads n_h nh num_h
        """,
        "head_dim": """
            head_dim d_head dim_head d_k d_v head_size attn_head_dim attention_head_size d_kv
            attention_head_dim head_dims dim_heads dim_per_head head_width c_hidden dk dv d_h dh
        """,
        "score_scalar": " ".join(SCALARS),
        "bias": "bias use_bias attention_bias add_bias with_bias",
        "qkv_bias": "qkv_bias attn_qkv_bias in_proj_bias qkv_proj_bias",
        "q_bias": "q_bias",
        "k_bias": "k_bias",
        "v_bias": "v_bias",
        "kv_bias": "kv_bias",
        "o_bias": "o_bias out_bias proj_bias out_proj_bias",
        "dropout": """
            dropout dropout_prob dropout_rate attn_drop attn_dropout attn_pdrop attention_dropout
            attention_probs_dropout_prob dropout_p p_dropout drop_rate drop_prob attn_drop_rate
            attn_dropout_rate attn_dropout_prob attention_dropout_rate attention_dropout_prob p
            attn_score_dropout attention_drop attn_p att_dropout att_drop dropout_attn p_drop drop_p
            attn_drop_prob attention_p p_attn
        """,
        "output_dropout": """
            proj_drop proj_dropout resid_drop resid_dropout resid_pdrop hidden_dropout_prob out_drop
            out_dropout output_dropout hidden_dropout attn_layer_dropout
        """,
        "max_length": """
            block_size context_length max_len max_length max_seq_len max_position_embeddings n_ctx
            seq_len max_seq_length n_positions max_sequence_length ctx_len
        """,
        "max_batch": "max_batch_size max_batch max_bsz",
        "n_kv_heads": """
            n_kv_heads num_kv_heads num_key_value_heads kv_heads n_kv_head n_key_value_heads
            kv_n_heads num_kv_groups n_kv_groups num_query_groups n_query_groups num_kv_head
            num_groups n_groups num_heads_kv n_heads_kv n_local_heads kv_num_heads
        """,
        "kdim": """
            kdim key_size context_dim cross_attention_dim memory_dim kv_dim E_k d_cross d_context
            dim_kv dim_context encoder_dim cond_dim d_memory c_k mem_dim d_mem enc_dim d_enc
            d_encoder dim_memory src_dim
        """,
        "vdim": "vdim value_size E_v c_v",
        "bias_kv": "bias_kv add_bias_kv",
        "zero_key": "zero_key add_zero_attn",
        "batch_first": "batch_first",
        "causal": "causal is_causal use_causal use_causal_mask masked autoregressive",
        "layer_index": "layer_idx layer_id layer_index block_idx block_index",
        "layer_number": "layer_number",
        "q_layer": "q_proj query_proj to_q",
        "k_layer": "k_proj key_proj to_k",
        "v_layer": "v_proj value_proj to_v",
        "o_layer": "o_proj out_proj output_proj to_out",
        "eps": "eps epsilon layer_norm_eps rms_norm_eps norm_eps layernorm_epsilon",
        "device": "device",
        "config": "config cfg args hparams params conf model_config model_args hp",
    }.items()
}
# The words of d_model and n_heads in other names, and those of other sizes.
SIZE_WORDS = {
    "n_heads": {"head", "heads"},
    "d_model": {
        *listed("dim dims dimension dimensions emb embed embeds embd embedding hidden hid width"),
        *listed("model feat feats feature features channel channels"),
    },
}
OTHER_SIZES = {
    *listed("q k v kv qk query key value per ff ffn feedforward mlp inner size"),
    *listed("rope rotary rot pos position max len length layers lora rank group groups"),
    *listed("context cross encoder memory mem"),
}
# Given only where the constructor requires them: by default, the constructor decides.
IF_REQUIRED = listed("causal eps device layer_index layer_number q_layer k_layer v_layer o_layer")
EPS_WORDS = ("eps", "epsilon")
# What a config class has besides keeps its own value too.
KEPT = {name for field in IF_REQUIRED for name in CONSTRUCTOR_NAMES[field]}
# A block_size of so many positions may be that of a tile, and is kept.
TILE_LENGTHS = (8, 16, 32, 64, 128, 256)
# Cases vary these, though a `functools.partial` sets them; all else that one sets is kept.
VARIED = {
    *listed("config d_model n_heads n_kv_heads head_dim kdim vdim max_length max_batch"),
    *listed("dropout output_dropout batch_first bias_kv zero_key score_scalar"),
}
VARIED_NAMES = {name for field in VARIED for name in CONSTRUCTOR_NAMES[field]}
# The projections that an argument of `CONSTRUCTOR_NAMES` for biases is about; it is true if one of
# them has a bias.
BIAS_ROLES = {"bias": "qkvo"}
for _count in (1, 2, 3):
    for _roles in map("".join, combinations("qkvo", _count)):
        BIAS_ROLES[f"{_roles}_bias"] = _roles
VARIADIC = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
# The width of the query beside a width of keys or values.
WIDTH_OF_QUERY = {"key_dim": "query_dim", "k_dim": "q_dim", "v_dim": "q_dim"}


def without_partial(constructor: object) -> Any:
    """Return the class or the function that a `functools.partial` calls; any other as it is."""
    return constructor.func if isinstance(constructor, partial) else constructor


def missing_of(known: Mapping[str, str]) -> list[str]:
    """Return which of d_model and n_heads no parameter is given, nor a config."""
    return [field for field in ("d_model", "n_heads") if not {field, "config"} & {*known.values()}]


def fields_of(parameters: Mapping[str, inspect.Parameter]) -> dict[str, str]:
    """Return the meaning of each parameter whose name is known, a key of `CONSTRUCTOR_NAMES`."""
    ordinary = {name for name, parameter in parameters.items() if parameter.kind not in VARIADIC}
    fields: dict[str, str] = {}
    for field, names in CONSTRUCTOR_NAMES.items():
        for name in names:
            if name in ordinary:
                fields[name] = field
    for name in ordinary - fields.keys():
        if words_of(name)[-1:] in ([word] for word in EPS_WORDS):
            fields[name] = "eps"
    # Beside another width, a size is of something else.
    if "size" in ordinary and "d_model" not in fields.values():
        fields["size"] = "d_model"
    return fields | _of_inputs_or_heads(parameters)


def causal_flags(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the parameters of a constructor that are causal flags, by their names.

    >>> def build(x, masked=False, apply_causal_mask=True, non_causal=True): ...
    >>> causal_flags(inspect.signature(build).parameters)
    ['masked', 'apply_causal_mask']
    """
    known = CONSTRUCTOR_NAMES["causal"]
    return [
        name for name, p in parameters.items() if name in known or is_causal_flag(name, p.default)
    ]


def _of_inputs_or_heads(parameters: Mapping[str, inspect.Parameter]) -> dict[str, str]:
    """Return what widths of keys and values mean: those of inputs, where the query has one too.

    Without that, they are the width of a head, as in Keras. None may stand for d_model.
    """
    fields = {}
    for name, of_query in WIDTH_OF_QUERY.items():
        if name in parameters and parameters[name].default is not None:
            fields[name] = f"{name[0]}dim" if of_query in parameters else "head_dim"
    return fields


def by_words(defaults: Mapping[str, Any], missing: Collection[str]) -> dict[str, str]:
    """Return the one positive integer with a word of d_model or n_heads in its name.

    defaults: of parameters, by their names.
    missing: which of the two to look for.

    >>> defaults = {"embedding_dimension": 512, "n_attn_head": 8, "ff_dim": 2048}
    >>> by_words(defaults, ["d_model", "n_heads"])
    {'embedding_dimension': 'd_model', 'n_attn_head': 'n_heads'}
    """
    found: dict[str, str] = {}
    for field in missing:
        other = "n_heads" if field == "d_model" else "d_model"
        others = OTHER_SIZES | SIZE_WORDS[other]
        fitting = []
        for name, value in defaults.items():
            words = {*words_of(name)}
            is_called_so = words & SIZE_WORDS[field] and not words & others
            if is_called_so and type(value) is int and value > 0:
                fitting.append(name)
        if len(fitting) == 1:
            found[fitting[0]] = field
    return found
