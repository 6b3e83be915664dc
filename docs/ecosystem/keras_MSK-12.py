# keras 3.15.1: every mask is cast to boolean, so an additive mask (0 = allowed, -inf = masked) is read the other way round.
# multi_head_attention.py: `ops.cast(attention_mask, "bool")  # defensive casting`.
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch

layer, x = keras.layers.MultiHeadAttention(2, 4), torch.randn(1, 3, 8)
allowed = torch.tensor([True, True, False]).expand(1, 3, 3)
additive = torch.zeros(1, 3, 3).masked_fill(~allowed, float("-inf"))
print(
    "boolean: ",
    layer(x, x, attention_mask=allowed, return_attention_scores=True)[1][0, 0, 0].tolist(),
)
print(
    "additive:",
    layer(x, x, attention_mask=additive, return_attention_scores=True)[1][0, 0, 0].tolist(),
)
