# torch 2.13 CPU: attn_mask beside is_causal=True: the flash kernel joins the two, the math kernel refuses them; which of them
# runs is decided by a gradient of the mask, or by dropout. (The documentation says that both together are an error.)
import torch
import torch.nn.functional as F

q, mask = torch.randn(1, 1, 3, 4), torch.zeros(3, 3)
mask[:, 0] = -1.0
joined = F.scaled_dot_product_attention(
    q, q, q, mask.masked_fill(~torch.ones(3, 3, dtype=torch.bool).tril(), float("-inf"))
)
for name, bias, p in (
    ("mask", mask, 0.0),
    ("mask that requires a gradient", mask.clone().requires_grad_(), 0.0),
    ("mask, dropout", mask, 0.5),
):
    try:
        print(
            name,
            "joined:",
            torch.allclose(F.scaled_dot_product_attention(q, q, q, bias, p, is_causal=True), joined, atol=1e-6),
        )
    except RuntimeError as error:
        print(name, "refused:", error)
