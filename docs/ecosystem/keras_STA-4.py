# keras 3.15.1, torch backend: the names in state_dict contain the number of the layer in this process, so no other layer can
# load them, and each parameter is in it twice. (With name="..." given by the user, the names are equal.)
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch

a, b = (keras.layers.MultiHeadAttention(2, 4) for _ in "ab")
for layer in (a, b):
    layer(torch.randn(1, 3, 8), torch.randn(1, 3, 8))  # builds it
print(list(a.state_dict())[-1], "|", list(b.state_dict())[-1])
print(len(a.state_dict()), "names for", len(a.weights), "weights")
try:
    b.load_state_dict(a.state_dict())
except RuntimeError as error:
    print(str(error)[:90])
