# keras 3.15.1, torch backend: torch.func.functional_call uses the layer's own weights, whatever weights it is given.
# The layers read their Variables, which hold the tensors, and not the module's parameters of these names.
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch

layer, x = keras.layers.MultiHeadAttention(2, 4), torch.randn(1, 3, 8)
own = layer(x, x)
zeros = {name: torch.zeros_like(tensor) for name, tensor in layer.named_parameters()}
other = torch.func.functional_call(layer, zeros, (x, x))
print("with zero weights, the output is zero:", bool((other == 0).all()))
print("with zero weights, the output is that of its own weights:", torch.equal(other, own))
