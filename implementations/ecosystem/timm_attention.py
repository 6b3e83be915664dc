"""`timm.layers.Attention`, which is also that of timm's vision_transformer, fused and unfused."""

from functools import partial

from timm.layers import Attention

from mha.implementations import from_module
from mha.spec import Claims, causal_mask, join_causal
from mha.spec.claims import COMPUTE_DTYPES


class Timm(Attention):
    def __init__(self, dim, num_heads, bias, dropout, fused):
        super().__init__(dim, num_heads, qkv_bias=bias, proj_bias=bias, attn_drop=dropout)
        self.fused_attn = fused  # what timm.layers.set_fused_attn decides for all

    def forward(self, x, attn_mask=None, is_causal=False):
        if attn_mask is not None and is_causal:  # "mutually exclusive", it says
            attn_mask, is_causal = join_causal(attn_mask, causal_mask(x.shape[1], x.shape[1], "top_left")), False
        return super().forward(x, attn_mask, is_causal)


usual = {"parameters": {"w_qkv": "qkv", "w_o": "proj"}, "mask_shape": "b h l s"}
plain = {"cross_attention": False, "masks": {"bool", "float"}, "returns_weights": False, "dropout": True}
plain |= {"composes": {"compile", "func", "autocast"}, "dtypes": COMPUTE_DTYPES}
fused = from_module(partial(Timm, fused=True), name="timm-fused", **usual, claims=Claims(**plain))
unfused = from_module(partial(Timm, fused=False), name="timm-unfused", **usual,
                      claims=Claims(**plain, empty_row="nan"))  # fmt: skip
