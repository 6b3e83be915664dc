"""`timm.layers.Attention`, which timm's vision_transformer uses too, fused and unfused."""

from functools import partial

from timm.layers import Attention

from mha.implementations import from_module
from mha.spec import Claims, causal_mask, join_causal
from mha.spec.claims import COMPUTE_DTYPES


class Timm(Attention):
    def __init__(self, dim, num_heads, bias, dropout, fused):
        super().__init__(dim, num_heads, qkv_bias=bias, proj_bias=bias, attn_drop=dropout)
        self.fused_attn = fused  # timm.layers.set_fused_attn sets it for all

    def forward(self, x, attn_mask=None, is_causal=False):
        if attn_mask is not None and is_causal:  # "mutually exclusive" in timm
            attn_mask, is_causal = (
                join_causal(attn_mask, causal_mask(x.shape[1], x.shape[1], "top_left")),
                False,
            )
        return super().forward(x, attn_mask, is_causal)


OPTIONS = {"parameters": {"w_qkv": "qkv", "w_o": "proj"}, "mask_shape": "b h l s"}
CLAIMS = {
    "cross_attention": False,
    "masks": {"bool", "float"},
    "returns_weights": False,
    "dropout": True,
    "composes": {"compile", "func", "autocast"},
    "dtypes": COMPUTE_DTYPES,
}
fused = from_module(
    partial(Timm, fused=True), name="timm-fused", claims=Claims(**CLAIMS), **OPTIONS
)
unfused = from_module(
    partial(Timm, fused=False),
    name="timm-unfused",
    claims=Claims(**CLAIMS, empty_row="nan"),
    **OPTIONS,
)
