# transformers 5.23.0: an empty batch or sequence raises in `.view(*input_shape, -1, head_dim)`: -1 is ambiguous for 0 elements.
import torch
from transformers.models.vit.modeling_vit import ViTAttention, ViTConfig

module = ViTAttention(
    ViTConfig(hidden_size=8, num_attention_heads=2, attn_implementation="eager")
).eval()
for shape in ((0, 3, 8), (1, 0, 8)):
    try:
        print(shape, tuple(module(torch.randn(shape))[0].shape))
    except RuntimeError as error:
        print(shape, "raises:", error)
