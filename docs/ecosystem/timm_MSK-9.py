# timm 1.0.31: unfused, one empty row makes the gradients of all weights NaN, even if the loss does not read it; fused, they are
# finite. layers/attention.py, resolve_self_attn_mask: `attn_bias.masked_fill_(~attn_mask, float('-inf'))`, then softmax.
import torch
from timm.layers import Attention

attention, x = Attention(8, 2), torch.randn(2, 3, 8)
mask = (
    torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 3, 3)
)  # the second item is padding only
for fused in (True, False):
    attention.zero_grad()
    attention.fused_attn = fused
    attention(x, attn_mask=mask)[0].sum().backward()  # a loss of the first item only
    print(
        f"{fused=}: gradient of W_qkv is finite: {bool(attention.qkv.weight.grad.isfinite().all())}"
    )
