# keras 3.15.1, torch backend: a query of width 1 is broadcast to the width 8 that the layer was built for.
# EinsumDense leaves the shapes to torch.einsum, and its InputSpec(ndim=...) checks no widths; that of Dense has axes={-1: width}.
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch

layer, x = keras.layers.MultiHeadAttention(2, 4), torch.randn(1, 3, 8)
layer(x, x)  # builds it for the width 8
for width in (1, 5):
    try:
        print(width, tuple(layer(torch.randn(1, 3, width), x).shape))
    except Exception as error:
        print(width, "rejected:", str(error)[:60].replace("\n", " "))
