# transformers 5.23.0, eager: with a mask of -inf one empty row makes the gradients of all weights NaN, though no loss reads it;
# masking_utils.eager_mask therefore fills with finfo.min, whose empty rows are the mean of all values.
import torch
from transformers.models.vit.modeling_vit import ViTAttention, ViTConfig

module, x = (
    ViTAttention(ViTConfig(hidden_size=8, num_attention_heads=2, attn_implementation="eager")),
    torch.randn(2, 3, 8),
)
for lowest in (torch.finfo(torch.float32).min, float("-inf")):
    module.zero_grad()
    mask = torch.zeros(2, 1, 1, 3)
    mask[1] = lowest  # the second item is wholly padded
    module(x, mask)[0][0].sum().backward()  # a loss of the first alone
    print(lowest, "-> gradient of W_q is finite:", bool(module.q_proj.weight.grad.isfinite().all()))
