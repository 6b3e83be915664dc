# transformers 5.23.0, eager: an integer 0/1 mask is added to the scores, so a masked key keeps 37 % of its weight.
# modeling_vit.py, eager_attention_forward: `attn_weights = attn_weights + attention_mask`; the same in llama, bert and gpt2.
import torch
from transformers.models.vit.modeling_vit import ViTAttention, ViTConfig

x = torch.zeros(1, 4, 8)
mask = torch.tensor([1, 1, 0, 0]).view(1, 1, 1, 4)  # int64; the last two keys are masked
for name in ("eager", "sdpa"):
    module = ViTAttention(
        ViTConfig(hidden_size=8, num_attention_heads=2, attn_implementation=name)
    ).eval()
    try:
        weights = module(x, mask)[1]
        print(name, "accepted, weights of a row:", weights[0, 0, 0].tolist())
    except RuntimeError as error:
        print(name, "rejected:", error)
