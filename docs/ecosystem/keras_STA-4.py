# keras 3.15.1, torch backend: names in state_dict hold the number of the layer in this process, so no other layer can load it;
# and each parameter is there twice. (With name="..." given by the user the names are equal.)
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch

a, b = (keras.layers.MultiHeadAttention(2, 4) for _ in "ab")
a(torch.randn(1, 3, 8), torch.randn(1, 3, 8)), b(torch.randn(1, 3, 8), torch.randn(1, 3, 8))
print(
    list(a.state_dict())[-1],
    "|",
    list(b.state_dict())[-1],
    "|",
    len(a.state_dict()),
    "names for",
    len(a.weights),
    "weights",
)
try:
    b.load_state_dict(a.state_dict())
except RuntimeError as error:
    print(str(error)[:90])
