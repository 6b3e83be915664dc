# x-transformers 2.31.10: with flash=True, Attention.forward(causal=True) attends to the future.
# attend.py, Attend.forward: `return self.flash_attn(q, k, v, mask=..., attn_bias=..., ...)` does not pass `causal` on.
import torch
from x_transformers.x_transformers import Attention

torch.manual_seed(0)
x = torch.randn(1, 4, 8)
for flash in (False, True):
    attention = Attention(8, dim_head=4, heads=2, flash=flash).eval()
    y = x.clone()
    y[:, -1] += 1  # only the last position
    difference = (attention(y, causal=True) - attention(x, causal=True))[:, 0].abs().max().item()
    print(f"{flash=}: the first output changes by {difference}")
