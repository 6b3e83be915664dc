# timm 1.0.31: unfused, is_causal=True silently drops attn_mask; fused, both are applied (torch 2.13, CPU).
# layers/attention.py, resolve_self_attn_mask: "is_causal and attn_mask are mutually exclusive (is_causal takes precedence)".
import torch
from timm.layers import Attention

attention, x = Attention(8, 2).eval(), torch.randn(1, 3, 8)
mask = torch.eye(3, dtype=torch.bool)  # each position attends to itself only
for fused in (True, False):
    attention.fused_attn = fused
    alone = attention(x, attn_mask=mask)
    both = attention(x, attn_mask=mask, is_causal=True)
    plain = attention(x, is_causal=True)
    print(f"{fused=}: mask applied: {torch.allclose(both, alone, atol=1e-6)}")
    print(f"{fused=}: mask dropped: {torch.allclose(both, plain, atol=1e-6)}")
