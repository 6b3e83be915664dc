# x-transformers 2.31.10: query head h uses key head h % kv_heads; torch, JAX and Llama (Ainslie et al. 2023) use h // groups.
# attend.py: `repeat(t, 'b kvh n d -> b (r kvh) n d', r = heads // kv_heads)`.
import torch
import torch.nn.functional as F
from x_transformers.attend import Attend

torch.manual_seed(0)
q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
out = Attend(heads=4)(q, k, v)[0]
for name, pair in (("h // groups", [0, 0, 1, 1]), ("h % kv_heads", [0, 1, 0, 1])):
    print(
        name,
        torch.allclose(out, F.scaled_dot_product_attention(q, k[:, pair], v[:, pair]), atol=1e-6),
    )
