"""`x_transformers.Attention`, plain and flash; no projection has a bias."""

from functools import partial

from x_transformers.x_transformers import Attention

from mha.implementations import from_module
from mha.spec import Claims, Rounding, causal_mask, join_causal
from mha.spec.claims import COMPUTE_DTYPES


class XTransformers(Attention):
    def __init__(self, d_model, n_heads, n_kv_heads, dropout, flash):
        if (
            d_model <= 0 or n_heads <= 0 or d_model % n_heads
        ):  # x-transformers takes the width of a head as well
            raise ValueError(
                f"d_model ({d_model}) must be a positive multiple of n_heads ({n_heads})"
            )
        heads = {"dim_head": d_model // n_heads, "heads": n_heads, "kv_heads": n_kv_heads}
        super().__init__(
            d_model, **heads, dropout=dropout, flash=flash, project_out=True
        )  # also with one head

    def forward(self, x, attn_mask=None, is_causal=False):
        # Flash ignores the flag; plain, a row that mask and flag empty together would attend to all
        # keys.
        if is_causal and (attn_mask is not None or self.attend.flash):
            attn_mask, is_causal = (
                join_causal(attn_mask, causal_mask(x.shape[1], x.shape[1], "top_left")),
                False,
            )
        return super().forward(x, attn_mask=attn_mask, causal=is_causal)


OPTIONS = {
    "parameters": {"w_q": "to_q", "w_k": "to_k", "w_v": "to_v", "w_o": "to_out"},
    "mask": "keep",
    "mask_shape": "b h l s",
}
CLAIMS = {
    "cross_attention": False,
    "returns_weights": False,
    "bias": {False},
    "dropout": True,
    "grouped_query": True,
    "composes": {"compile", "func", "autocast"},
    "dtypes": COMPUTE_DTYPES,
}
implementation = from_module(
    partial(XTransformers, flash=False),
    name="x-transformers",
    claims=Claims(**CLAIMS, rounding=Rounding(softmax_in_float32=True)),
    **OPTIONS,
)
flash = from_module(
    partial(XTransformers, flash=True),
    name="x-transformers-flash",
    claims=Claims(**CLAIMS),
    **OPTIONS,
)
