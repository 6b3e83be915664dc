"""transformers' `ViTAttention`, eager and sdpa."""

from functools import partial

import torch
from transformers.models.vit.modeling_vit import ViTAttention, ViTConfig

from mha.implementations import from_module
from mha.spec import Claims, Rounding
from mha.spec.claims import COMPUTE_DTYPES


class ViT(ViTAttention):
    def __init__(self, d_model, n_heads, dropout, attn):
        sizes = {"hidden_size": d_model, "num_attention_heads": n_heads}
        super().__init__(ViTConfig(**sizes, attention_probs_dropout_prob=dropout, attn_implementation=attn))

    def forward(self, hidden_states, attention_mask=None):
        if attention_mask is not None and self.config._attn_implementation == "eager":  # as masking_utils.eager_mask
            attention_mask = attention_mask.clamp(min=torch.finfo(hidden_states.dtype).min)
        return super().forward(hidden_states, attention_mask)


names = {f"w_{role}": f"{role}_proj" for role in "qkvo"}
usual = {"parameters": names, "mask_shape": "b h l s"}
plain = {"cross_attention": False, "masks": {"bool", "float"}, "dropout": True, "bias": {True}}
in_32 = Rounding(softmax_in_float32=True)  # a cast in eager_attention_forward
plain |= {"composes": {"compile", "func", "autocast"}, "dtypes": COMPUTE_DTYPES}
eager = from_module(partial(ViT, attn="eager"), name="vit-eager", **usual, mask="additive",
                    claims=Claims(**plain, empty_row="uniform", rounding=in_32))  # fmt: skip
sdpa = from_module(partial(ViT, attn="sdpa"), name="vit-sdpa", **usual, mask="keep",
                   claims=Claims(**plain, returns_weights=False))  # fmt: skip
