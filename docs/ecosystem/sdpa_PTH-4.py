# torch 2.13, CPU: with attn_mask and is_causal=True, the flash kernel applies both and the math kernel rejects them. A gradient of
# the mask, or dropout, decides which of the two runs. (The documentation says that both together are an error.)
import torch
import torch.nn.functional as F

q, mask = torch.randn(1, 1, 3, 4), torch.zeros(3, 3)
mask[:, 0] = -1.0
causal = torch.ones(3, 3, dtype=torch.bool).tril()
both = F.scaled_dot_product_attention(q, q, q, mask.masked_fill(~causal, float("-inf")))
for name, bias, p in (
    ("mask", mask, 0.0),
    ("mask that requires a gradient", mask.clone().requires_grad_(), 0.0),
    ("mask, dropout", mask, 0.5),
):
    try:
        output = F.scaled_dot_product_attention(q, q, q, bias, p, is_causal=True)
        print(name, "applies both:", torch.allclose(output, both, atol=1e-6))
    except RuntimeError as error:
        print(name, "rejected:", error)
