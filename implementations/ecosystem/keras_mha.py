"""`keras.layers.MultiHeadAttention` on the torch backend of keras."""

import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
from torch import nn

from mha.implementations import from_module
from mha.spec import Claims


class Keras(nn.Module):
    def __init__(self, d_model, n_heads, bias, dropout):
        super().__init__()
        if (
            d_model <= 0 or n_heads <= 0 or d_model % n_heads
        ):  # keras takes the width of a head instead
            raise ValueError(
                f"d_model ({d_model}) must be a positive multiple of n_heads ({n_heads})"
            )
        # Without a name, the names of the parameters contain a number that differs from layer to
        # layer.
        options = {"dropout": dropout, "use_bias": bias, "name": "attention"}
        self.layer = keras.layers.MultiHeadAttention(n_heads, d_model // n_heads, **options)
        self.layer.build((None, None, d_model), (None, None, d_model))

    def forward(self, query, key, value, mask=None, is_causal=False, need_weights=False):
        options = {
            "use_causal_mask": is_causal,
            "return_attention_scores": need_weights,
            "training": self.training,
        }
        return self.layer(query, value, key, attention_mask=mask, **options)


def parameters(config):
    layers = {"q": "query", "k": "key", "v": "value"}
    paths = {
        f"w_{r}": (f"layer.{n}_dense._kernel.value", "(h e) d -> d h e") for r, n in layers.items()
    }
    paths |= {
        "w_o": ("layer.output_dense._kernel.value", "d (h e) -> h e d"),
        "b_o": "layer.output_dense.bias.value",
    }
    paths |= {f"b_{r}": (f"layer.{n}_dense.bias.value", "(h e) -> h e") for r, n in layers.items()}
    return {key: path for key, path in paths.items() if config.bias or key[0] == "w"}


implementation = from_module(
    Keras,
    name="keras",
    parameters=parameters,
    mask="keep",
    mask_shape="b h l s",
    claims=Claims(dropout=True, dtypes={"float32"}),
)
