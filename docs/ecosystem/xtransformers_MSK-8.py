# x-transformers 2.31.10, plain: a row that mask and causality empty together attends to all keys, future and masked ones too.
# attend.py: `row_is_entirely_masked = ~mask.any(dim = -1)` is of the mask only; scores are filled with -finfo.max.
import torch
from x_transformers.x_transformers import Attention

torch.manual_seed(0)
attention, x = Attention(8, dim_head=4, heads=2).eval(), torch.randn(1, 4, 8)
mask = torch.tensor([False, True, True, True]).expand(
    1, 1, 4, 4
)  # left padding: the first query has no key
out = attention(x, attn_mask=mask, causal=True)
values = attention.to_v(x)
mean = attention.to_out(values.mean(1))[0]
none_allowed = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
print("empty by mask, the output is zero:", bool((attention(x, attn_mask=none_allowed) == 0).all()))
print(
    "empty by mask and causality, it is the mean of all values:",
    torch.allclose(out[0, 0], mean, atol=1e-6),
)
