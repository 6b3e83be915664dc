"""transformers' `LlamaAttention`, eager and sdpa, with its rotary embedding switched off (cos = 1,
sin = 0).
"""

from functools import partial

import torch
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig

from mha.implementations import from_module
from mha.spec import Claims, Rounding
from mha.spec.claims import COMPUTE_DTYPES


class Llama(LlamaAttention):
    def __init__(self, d_model, n_heads, n_kv_heads, bias, dropout, attn):
        sizes = {
            "hidden_size": d_model,
            "num_attention_heads": n_heads,
            "num_key_value_heads": n_kv_heads,
        }
        options = {
            "attention_bias": bias,
            "attention_dropout": dropout,
            "attn_implementation": attn,
        }
        rope = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}  # an odd d_k is rejected otherwise
        super().__init__(LlamaConfig(**sizes, **options, rope_parameters=rope), layer_idx=0)

    def forward(self, hidden_states, attention_mask=None):
        eager = self.config._attn_implementation == "eager"
        if attention_mask is not None and eager:  # as masking_utils.eager_mask does
            attention_mask = attention_mask.clamp(min=torch.finfo(hidden_states.dtype).min)
        cos = hidden_states.new_ones(*hidden_states.shape[:2], self.head_dim)
        return super().forward(hidden_states, (cos, 0 * cos), attention_mask, is_causal=False)


OPTIONS = {"parameters": {f"w_{role}": f"{role}_proj" for role in "qkvo"}, "mask_shape": "b h l s"}
CLAIMS = {
    "cross_attention": False,
    "masks": {"bool", "float"},
    "dropout": True,
    "grouped_query": True,
    "composes": {"compile", "func", "autocast"},
    "dtypes": COMPUTE_DTYPES,
}
IN_FLOAT32 = Rounding(softmax_in_float32=True)  # a cast in eager_attention_forward
eager = from_module(
    partial(Llama, attn="eager"),
    name="llama-eager",
    mask="additive",
    claims=Claims(**CLAIMS, empty_row="uniform", rounding=IN_FLOAT32),
    **OPTIONS,
)
sdpa = from_module(
    partial(Llama, attn="sdpa"),
    name="llama-sdpa",
    mask="keep",
    claims=Claims(**CLAIMS, returns_weights=False),
    **OPTIONS,
)
