"""Which forms PTH-3 compares, and which layers STA-9 looks for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha.implementations import from_module
from mha.spec import Claims
from support.judging import expect_fail, verdict_of
from support.right_classes import Heads


class PaddedAndCausal(Heads):
    """Always causal, with a mask of (B, 1, 1, S) or (1, 1, 1, S), True = may attend."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        earlier = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        hidden = ~(earlier if mask is None else earlier & self.read(mask, len(x)))
        return self.of(x, x, x, hidden)

    def read(self, mask: Tensor, items: int) -> Tensor:
        del items
        return mask


class OfItemsOnly(PaddedAndCausal):
    """Ignores a mask that all items share."""

    def read(self, mask: Tensor, items: int) -> Tensor:
        return mask if len(mask) == items else torch.ones_like(mask)


PATHS = {f"w_{role}": f"w_{role}" for role in "qkvo"}
CLAIMS = Claims(
    cross_attention=False,
    always_causal=True,
    per_head_mask=False,
    per_query_mask=False,
    returns_weights=False,
)


def test_a_mask_of_items_has_two_forms_where_calls_are_always_causal() -> None:
    right, wrong = (
        from_module(cls, parameters=PATHS, claims=CLAIMS) for cls in (PaddedAndCausal, OfItemsOnly)
    )
    assert verdict_of(right, "PTH-3").status == "pass"
    expect_fail(wrong, "PTH-3", "the same mask expanded")


class Projection(nn.Module):
    """A linear layer of its own, whose weight is transposed."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class OwnLayers(Heads):
    """Its output projection is a layer of a class of its own."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.w_o = Projection(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x, x, x)


class ReadsWeights(OwnLayers):
    """Reads the weight, and calls no layer."""

    def forward(self, x: Tensor) -> Tensor:
        context = self.attend(self.w_q(x), self.w_k(x), self.w_v(x))
        return F.linear(context, self.w_o.weight.mT)


def test_layers_of_other_classes_are_called_too() -> None:
    names = PATHS | {"w_o": ("w_o", "o i -> i o")}
    claims = Claims(
        masks=(), cross_attention=False, causal=None, returns_weights=False, bias={"qkv"}
    )
    right, wrong = (
        from_module(cls, parameters=names, mask=None, claims=claims)
        for cls in (OwnLayers, ReadsWeights)
    )
    assert verdict_of(right, "STA-9").status == "pass"
    expect_fail(wrong, "STA-9", "the weight of the layer 'module.w_o' counts")
