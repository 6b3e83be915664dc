# torch 2.13.0, flex_attention compiled for the CPU: with a mask function that reads a tensor, the second length is
# compiled as a dynamic one, and the compiler rejects the C++ that is generated for it.
# 8: within 5e-07. 11: CppCompileError: 'cur_qSplitSize3' was not declared in this scope
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

compiled = torch.compile(flex_attention)
for length in (8, 11):
    x = torch.randn(1, 2, length, 16)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    blocks = create_block_mask(
        lambda b, h, i, j: mask[i, j], None, None, length, length, device="cpu"
    )
    with torch.no_grad():
        expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)
        error = (compiled(x, x, x, block_mask=blocks) - expected).abs().max()
    print(f"{length}: within {error:.0e}")
