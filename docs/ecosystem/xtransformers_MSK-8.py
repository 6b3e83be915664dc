# x-transformers 2.31.10, plain: a row that mask and causality empty together attends to all keys, the future and the masked.
# attend.py: `row_is_entirely_masked = ~mask.any(dim = -1)` is of the mask alone; scores are filled with -finfo.max.
import torch
from x_transformers.x_transformers import Attention

torch.manual_seed(0)
attention, x = Attention(8, dim_head=4, heads=2).eval(), torch.randn(1, 4, 8)
mask = torch.tensor([False, True, True, True]).expand(1, 1, 4, 4)  # left padding: the first query has no key
out = attention(x, attn_mask=mask, causal=True)
values = attention.to_v(x)
print(
    "empty by mask alone is zero:", bool((attention(x, attn_mask=torch.zeros(1, 1, 4, 4, dtype=torch.bool)) == 0).all())
)
print(
    "empty by mask and causal is the mean of all values:",
    torch.allclose(out[0, 0], attention.to_out(values.mean(1))[0], atol=1e-6),
)
