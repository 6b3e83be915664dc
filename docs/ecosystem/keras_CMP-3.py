# keras 3.15.1, torch backend: torch.func.functional_call runs with the layer's own weights, whatever weights it is given:
# layers read their Variables, which hold the tensors themselves, not the module's parameters of these names.
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch

layer, x = keras.layers.MultiHeadAttention(2, 4), torch.randn(1, 3, 8)
own = layer(x, x)
zeros = {name: torch.zeros_like(tensor) for name, tensor in layer.named_parameters()}
other = torch.func.functional_call(layer, zeros, (x, x))
print(
    "with all weights zero the output is zero:", bool((other == 0).all()), "| as with its own:", torch.equal(other, own)
)
