# timm 1.0.31, unfused: an integer 0/1 mask is added to the scores (maybe_add_mask: `scores + attn_mask`); fused it is refused.
import torch
from timm.layers import Attention

attention, x = Attention(8, 2).eval(), torch.randn(1, 3, 8)
mask = torch.tensor([1, 1, 0]).expand(1, 1, 3, 3)
y = x.clone()
y[:, -1] += 1  # only the masked position
for fused in (True, False):
    attention.fused_attn = fused
    try:
        print(
            f"{fused=}: a masked key moves the first output by",
            (attention(x, mask) - attention(y, mask))[0, 0].abs().max().item(),
        )
    except RuntimeError as error:
        print(f"{fused=}: refused:", str(error)[:90])
