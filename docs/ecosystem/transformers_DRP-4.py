# transformers 5.23.0, eager: the weights returned in training are those after dropout, so their rows do not sum to 1.
# eager_attention_forward: `attn_weights = dropout(attn_weights, ...)`, then `return attn_output, attn_weights`.
import torch
from transformers.models.vit.modeling_vit import ViTAttention, ViTConfig

torch.manual_seed(0)
config = ViTConfig(
    hidden_size=8,
    num_attention_heads=2,
    attention_probs_dropout_prob=0.5,
    attn_implementation="eager",
)
print(ViTAttention(config).train()(torch.randn(1, 4, 8))[1].sum(-1)[0, 0].tolist())
