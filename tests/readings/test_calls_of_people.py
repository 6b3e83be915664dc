"""Calls as people write them: masks in objects, `__call__`, names of a memory."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from mha.implementations.adapters.signature import memory_name, signature_of
from mha.implementations.inference.infer import infer
from mha.implementations.inference.kernels import infer_kernel
from support.readings import findings, refusal_of


def of_object(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None) -> Tensor:
    """The mask is an object, whose attribute `hidden` is True where a query may not attend."""
    allowed = ~attn_mask.hidden if attn_mask else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


def test_mask_in_an_object_is_read() -> None:
    result = infer_kernel(of_object)
    assert findings(result)["mask"].endswith(", as the attribute hidden of an object")
    assert 'mask="drop",\n    mask_attribute="hidden",' in result.declaration


class Called(nn.Module):
    """Self-attention without `forward`."""

    def __init__(self, n_units: int, h: int = 8) -> None:
        super().__init__()
        self.h = h
        self.linearQ, self.linearK, self.linearV, self.linearO = (
            nn.Linear(n_units, n_units) for _ in range(4)
        )

    def attend(self, x: Tensor) -> Tensor:
        layers = (self.linearQ, self.linearK, self.linearV)
        q, k, v = (layer(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for layer in layers)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.linearO(out.reshape(x.shape))

    def __call__(self, x: Tensor) -> Tensor:  # type: ignore[override]  # the point
        return self.attend(x)


class Flat(Called):
    """All positions are one axis, as in EEND."""

    def __call__(self, x: Tensor, batch_size: int) -> Tensor:  # type: ignore[override]  # the point
        return self.attend(x.unflatten(0, (batch_size, -1))).flatten(0, 1)


def test_call_stands_for_forward() -> None:
    assert findings(infer(Called))["formula"] == "softmax(q k^T / sqrt(d_k)) v W_o"


def test_class_that_takes_all_positions_at_once_is_wrapped() -> None:
    _, _, code = refusal_of(Flat).partition("in the usual way: ")
    variables = dict[str, Any](globals())
    exec(code, variables)  # as if it were pasted
    assert findings(infer(variables["Batched"]))["formula"] == "softmax(q k^T / sqrt(d_k)) v W_o"


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda X, X_KV=None, kv_mask=None: X, "X_KV"),
        (lambda x, cross_states=None, encoder_lengths=None: x, "cross_states"),
        (lambda x, kv_cache=None, context_len=None: x, None),
    ],
)
def test_memory_is_known_by_the_words_of_its_name(function: Any, name: str | None) -> None:
    assert memory_name(inspect.signature(function).parameters) == name


class OfPositions(Called):
    """Each call needs the positions, which count by their number only."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        assert position_ids.shape == x.shape[:2]
        return self.attend(x)

    __call__ = nn.Module.__call__


def test_positions_are_given_as_zeros_and_not_covered() -> None:
    result = infer(OfPositions)
    assert findings(result)["given"] == "position_ids=0 for each"
    assert result.not_covered == ("position_ids other than 0",)


def test_keyword_only_input_is_given_by_its_name() -> None:
    def forward(*, x: Tensor, context: Tensor | None = None) -> None: ...

    signature = signature_of(inspect.signature(forward).parameters)
    assert (signature.query, signature.memory) == ("x", "context")
    assert signature.has_optional_memory
