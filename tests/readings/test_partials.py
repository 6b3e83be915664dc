"""What a constructor, or a `functools.partial` of it, sets by itself is kept, but for what the
cases vary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mha.conformance import check
from mha.implementations.inference.infer import Inference, infer
from support.plain import Plain, verdict


class Scaled(Plain):
    """Its scores are multiplied by the number of its layer, as Megatron's are before they are
    divided by it.
    """

    def __init__(self, d_model: int, n_heads: int, layer_number: int) -> None:
        super().__init__(d_model, n_heads)
        self.layer_number = layer_number

    def place(self, q: Tensor) -> Tensor:
        return q * self.layer_number


class ScaledByDefault(Scaled):
    def __init__(self, d_model: int, n_heads: int, layer_number: int = 1) -> None:
        super().__init__(d_model, n_heads, layer_number)


def built(result: Inference) -> str:
    return next(row.finding for row in result.rows if row.topic == "built as")


class ScaledBelow(Scaled):
    """None is no number of a layer."""

    def __init__(self, d_model: int, n_heads: int, layer_idx: int | None = None) -> None:
        assert layer_idx is not None
        super().__init__(d_model, n_heads, layer_idx + 1)


BUILT: dict[Callable[..., nn.Module], str] = {
    Scaled: "layer_number=1)",
    ScaledByDefault: "n_heads=n_heads)",
    partial(Scaled, layer_number=1): "layer_number=1)",
    ScaledBelow: "layer_idx=0)",
}


@pytest.mark.parametrize("made", BUILT, ids=["required", "default", "partial", "None"])
def test_number_of_a_layer_is_kept_and_else_counts_from_one(made: Callable[..., nn.Module]) -> None:
    result = infer(made, "attention")
    assert built(result).endswith(BUILT[made])
    assert built(result).count("layer_number") == BUILT[made].count("layer_number")
    assert verdict(result, "HED-1") == ("pass", True)


class WithOptions(nn.Module):
    """Takes biases in three of its layers, and the width of a head."""

    def __init__(self, d_model: int, n_heads: int, head_dim: int, bias: bool = True) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v = (
            nn.Linear(d_model, n_heads * head_dim, bias=bias) for _ in range(3)
        )
        self.out = nn.Linear(n_heads * head_dim, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        output: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return output


def test_partial_keeps_what_it_sets_but_sizes() -> None:
    result = infer(partial(WithOptions, bias=False, head_dim=8), "attention")
    assert (
        built(result)
        == "attention(d_model=d_model, n_heads=n_heads, head_dim=head_dim, bias=False)"
    )
    assert next(row.finding for row in result.rows if row.topic == "biases") == "on o"
    assert result.implementation.claims.own_head_dim
    assert check(
        result.implementation, "quick", clauses=["CFG-5", "HED-1"], dtypes=["float32"]
    ).conforms


class WithFrequencies(Plain):
    """Takes a tensor, and the width of a head by the name that Keras has for it."""

    def __init__(self, d_model: int, n_heads: int, frequencies: Tensor, key_dim: int = 64) -> None:
        nn.Module.__init__(self)
        self.n_heads, self.frequencies = n_heads, frequencies
        self.qkv, self.proj = (
            nn.Linear(d_model, 3 * n_heads * key_dim),
            nn.Linear(n_heads * key_dim, d_model),
        )


def test_partial_may_set_a_tensor_and_a_default_width_varies() -> None:
    result = infer(partial(WithFrequencies, frequencies=torch.ones(4)), "attention")
    assert result.implementation.claims.own_head_dim
    assert verdict(result, "HED-1") == ("pass", True)


class Averages(Plain):
    """Returns the mean of the weights of its heads."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # and weights
        return self.attend(x, mask), torch.ones(*x.shape[:2], x.shape[1]) / x.shape[1]


def test_weights_that_are_averaged_are_said_to_be_returned() -> None:
    weights = next(row.finding for row in infer(Averages).rows if row.topic == "weights")
    assert weights == "not returned per head, but of shape (b, l, s)"
