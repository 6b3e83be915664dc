# timm 1.0.31: unfused, an integer 0/1 mask is added to the scores (maybe_add_mask: `scores + attn_mask`); fused, it is rejected.
import torch
from timm.layers import Attention

attention, x = Attention(8, 2).eval(), torch.randn(1, 3, 8)
mask = torch.tensor([1, 1, 0]).expand(1, 1, 3, 3)
y = x.clone()
y[:, -1] += 1  # only at the masked position
for fused in (True, False):
    attention.fused_attn = fused
    try:
        difference = (attention(x, mask) - attention(y, mask))[0, 0].abs().max().item()
        print(f"{fused=}: a masked key changes the first output by {difference}")
    except RuntimeError as error:
        print(f"{fused=}: rejected:", str(error)[:90])
