"""transformers' `LlamaAttention`, eager and sdpa, its rotary embedding switched off (cos = 1, sin = 0)."""

from functools import partial

import torch
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig

from mha.implementations import from_module
from mha.spec import Claims, Rounding
from mha.spec.claims import COMPUTE_DTYPES


class Llama(LlamaAttention):
    def __init__(self, d_model, n_heads, n_kv_heads, bias, dropout, attn):
        sizes = {"hidden_size": d_model, "num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads}
        options = {"attention_bias": bias, "attention_dropout": dropout, "attn_implementation": attn}
        rope = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}  # or it refuses a d_k that is odd
        super().__init__(LlamaConfig(**sizes, **options, rope_parameters=rope), layer_idx=0)

    def forward(self, hidden_states, attention_mask=None):
        if attention_mask is not None and self.config._attn_implementation == "eager":  # as masking_utils.eager_mask
            attention_mask = attention_mask.clamp(min=torch.finfo(hidden_states.dtype).min)
        cos = hidden_states.new_ones(*hidden_states.shape[:2], self.head_dim)
        return super().forward(hidden_states, (cos, 0 * cos), attention_mask, is_causal=False)


names = {f"w_{role}": f"{role}_proj" for role in "qkvo"}
usual = {"parameters": names, "mask_shape": "b h l s"}
plain = {"cross_attention": False, "masks": {"bool", "float"}, "dropout": True, "grouped_query": True}
plain |= {"composes": {"compile", "func", "autocast"}, "dtypes": COMPUTE_DTYPES}
in_32 = Rounding(softmax_in_float32=True)  # a cast in eager_attention_forward
eager = from_module(partial(Llama, attn="eager"), name="llama-eager", **usual, mask="additive",
                    claims=Claims(**plain, empty_row="uniform", rounding=in_32))  # fmt: skip
sdpa = from_module(partial(Llama, attn="sdpa"), name="llama-sdpa", **usual, mask="keep",
                   claims=Claims(**plain, returns_weights=False))  # fmt: skip
