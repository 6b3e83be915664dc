"""transformers' `GPT2Attention`, eager and sdpa: one Conv1D for q, k and v, of weight (in, out)."""

from functools import partial

import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Config

from mha.implementations import from_module
from mha.spec import Claims
from mha.spec.claims import COMPUTE_DTYPES


class GPT2(GPT2Attention):
    def __init__(self, d_model, n_heads, dropout, attn):
        sizes = {"n_embd": d_model, "n_head": n_heads, "attn_pdrop": dropout, "resid_pdrop": 0.0}
        super().__init__(GPT2Config(**sizes, attn_implementation=attn))

    def forward(self, hidden_states, attention_mask=None):
        eager = self.config._attn_implementation == "eager"
        if attention_mask is not None and eager:  # as masking_utils.eager_mask does
            attention_mask = attention_mask.clamp(min=torch.finfo(hidden_states.dtype).min)
        hidden_states = hidden_states.contiguous()  # Conv1D calls view
        return super().forward(hidden_states, attention_mask=attention_mask, is_causal=False)


OPTIONS = {
    "parameters": {"w_qkv": ("c_attn", "o i -> i o"), "w_o": ("c_proj", "o i -> i o")},
    "mask_shape": "b h l s",
}
CLAIMS = {
    "cross_attention": False,
    "masks": {"bool", "float"},
    "dropout": True,
    "bias": {True},
    "composes": {"compile", "func", "autocast"},
    "dtypes": COMPUTE_DTYPES,
}
eager = from_module(
    partial(GPT2, attn="eager"),
    name="gpt2-eager",
    mask="additive",
    claims=Claims(**CLAIMS, empty_row="uniform"),
    **OPTIONS,
)
sdpa = from_module(
    partial(GPT2, attn="sdpa"),
    name="gpt2-sdpa",
    mask="keep",
    claims=Claims(**CLAIMS, returns_weights=False),
    **OPTIONS,
)
