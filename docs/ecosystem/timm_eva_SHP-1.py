"""timm 1.0.31: EvaAttention raises for heads of a width of their own (`attn_head_dim`).

models/eva.py gives the contexts of all heads the width of the inputs, where AttentionRope gives
them that of all heads side by side.
"""

import torch
from timm.layers import AttentionRope
from timm.models.eva import EvaAttention

x = torch.zeros(1, 3, 8)
for cls, options in ((AttentionRope, {}), (EvaAttention, {"scale_norm": False})):
    attention = cls(8, num_heads=2, attn_head_dim=8, **options)
    try:
        print(cls.__name__, "returns", tuple(attention(x).shape))
    except RuntimeError as error:
        print(cls.__name__, "raises", error)
