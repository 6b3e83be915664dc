# keras 3.15.1, torch backend: a row with no allowed key gets the mean of all values, but zeros if scores are requested (also PTH-1).
# backend/torch/nn.py: mask = where(mask, 0, -0.7 * 3.39e38) for the fused kernel; Softmax.call: where(mask, outputs, 0.0).
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch

layer, x = keras.layers.MultiHeadAttention(2, 4), torch.randn(1, 3, 8)
mask = torch.zeros(1, 3, 3, dtype=torch.bool)
print("without scores:", layer(x, x, attention_mask=mask)[0, 0].tolist())
print(
    "with scores:   ",
    layer(x, x, attention_mask=mask, return_attention_scores=True)[0][0, 0].tolist(),
)
