# transformers 5.23.0, eager: with a mask of -inf, one empty row makes the gradients of all weights NaN, even if the loss does not
# read it. masking_utils.eager_mask therefore fills with finfo.min, for which an empty row is the mean of all values.
import torch
from transformers.models.vit.modeling_vit import ViTAttention, ViTConfig

module = ViTAttention(ViTConfig(hidden_size=8, num_attention_heads=2, attn_implementation="eager"))
x = torch.randn(2, 3, 8)
for lowest in (torch.finfo(torch.float32).min, float("-inf")):
    module.zero_grad()
    mask = torch.zeros(2, 1, 1, 3)
    mask[1] = lowest  # the second item is padding only
    module(x, mask)[0][0].sum().backward()  # a loss of the first item only
    print(lowest, "-> gradient of W_q is finite:", bool(module.q_proj.weight.grad.isfinite().all()))
