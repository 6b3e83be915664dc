# keras 3.15.1, torch backend: a query of width 1 is broadcast to the 8 that the layer was built for: EinsumDense leaves it to
# torch.einsum, and its InputSpec(ndim=...) knows no widths (Dense has axes={-1: width} there).
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch

layer, x = keras.layers.MultiHeadAttention(2, 4), torch.randn(1, 3, 8)
layer(x, x)  # builds it for a width of 8
for width in (1, 5):
    try:
        print(width, tuple(layer(torch.randn(1, 3, width), x).shape))
    except Exception as error:
        print(width, "refused:", str(error)[:60].replace("\n", " "))
