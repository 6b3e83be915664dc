# torch 2.13, CPU: the FLASH backend alone rejects a float mask that requires a gradient, and any mask with three axes; the MATH
# backend, or the default choice, takes both. The error says "No available kernel", and a warning gives the reason.
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

q, bias = torch.randn(1, 2, 3, 8), torch.zeros(3, 3)
for name, mask in (
    ("(3, 3)", bias),
    ("(3, 3) with gradient", bias.clone().requires_grad_()),
    ("(2, 3, 3)", bias.expand(2, 3, 3)),
):
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            try:
                print(
                    name, backend.name, tuple(F.scaled_dot_product_attention(q, q, q, mask).shape)
                )
            except RuntimeError as error:
                print(name, backend.name, "rejected:", error)
