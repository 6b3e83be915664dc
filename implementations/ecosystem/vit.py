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
        super().__init__(
            ViTConfig(**sizes, attention_probs_dropout_prob=dropout, attn_implementation=attn)
        )

    def forward(self, hidden_states, attention_mask=None):
        eager = self.config._attn_implementation == "eager"
        if attention_mask is not None and eager:  # as masking_utils.eager_mask does
            attention_mask = attention_mask.clamp(min=torch.finfo(hidden_states.dtype).min)
        return super().forward(hidden_states, attention_mask)


OPTIONS = {"parameters": {f"w_{role}": f"{role}_proj" for role in "qkvo"}, "mask_shape": "b h l s"}
CLAIMS = {
    "cross_attention": False,
    "masks": {"bool", "float"},
    "dropout": True,
    "bias": {True},
    "composes": {"compile", "func", "autocast"},
    "dtypes": COMPUTE_DTYPES,
}
IN_FLOAT32 = Rounding(softmax_in_float32=True)  # a cast in eager_attention_forward
eager = from_module(
    partial(ViT, attn="eager"),
    name="vit-eager",
    mask="additive",
    claims=Claims(**CLAIMS, empty_row="uniform", rounding=IN_FLOAT32),
    **OPTIONS,
)
sdpa = from_module(
    partial(ViT, attn="sdpa"),
    name="vit-sdpa",
    mask="keep",
    claims=Claims(**CLAIMS, returns_weights=False),
    **OPTIONS,
)
