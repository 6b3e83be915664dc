"""A class each of whose calls needs a mask is given one that allows everything where there is none."""

from __future__ import annotations

import math

import pytest
from torch import Tensor, nn

from mha.conformance import check
from mha.implementations import ImplementationError, from_module
from mha.implementations.inference.infer import infer

CLAUSES = ["SHP-1", "MSK-1", "MSK-2", "MSK-4", "CAU-1", "CAU-2", "HED-1", "GRD-1"]


class Attention(nn.Module):
    """The layers of query, key and value are a list, and the names are those of recommenders and
    translators.
    """

    def __init__(self, size: int, head_num: int, dropout_rate: float) -> None:
        super().__init__()
        self.head_num = head_num
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(3))
        self.final = nn.Linear(size, size)
        self.dropout = nn.Dropout(dropout_rate)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Add a mask, broadcastable to (B, H, L, S), to the scores."""
        given = zip(self.layers, (query, key, value), strict=True)
        q, k, v = (
            layer(x).unflatten(-1, (self.head_num, -1)).transpose(1, 2) for layer, x in given
        )
        weights = (q @ k.mT / math.sqrt(q.shape[-1]) + mask).softmax(-1)
        return self.final((self.dropout(weights) @ v).transpose(1, 2).flatten(2))


class Added(Attention):
    """As in UER-py."""

    def forward(self, key: Tensor, value: Tensor, query: Tensor, mask: Tensor) -> Tensor:
        return self.attend(query, key, value, mask.type_as(query))


class OneForAll(Attention):
    """As in TiSASRec: (L, S), True = may not attend."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor) -> Tensor:
        hidden = queries.new_zeros(attn_mask.shape).masked_fill(attn_mask, -math.inf)
        return self.attend(queries, keys, values, hidden[None, None])


class OfMemory(Attention):
    """As in XLM: (B, S) or (B, L, S), nonzero = may attend; without a memory, to the input itself."""

    def forward(self, input: Tensor, mask: Tensor, kv: Tensor | None = None) -> Tensor:
        memory = input if kv is None else kv
        rows = mask if mask.ndim == 3 else mask[:, None]
        hidden = input.new_zeros(rows.shape).masked_fill(rows == 0, -math.inf)
        return self.attend(input, memory, memory, hidden[:, None])


@pytest.mark.usefixtures("fewest_cases")
@pytest.mark.parametrize(
    ("cls", "row"),
    [
        (OfMemory, "True or 1 = may attend, of shape 'b l s', required in each call"),
        (Added, "added to the scores, broadcastable to (b, h, l, s), required in each call"),
        (OneForAll, "True = may not attend, of shape 'l s', required in each call"),
    ],
)
def test_required_mask_is_given(cls: type[nn.Module], row: str) -> None:
    result = infer(cls)
    assert row in result.report(200)
    assert "mask_required=True" in result.declaration
    assert not [each for each in result.rows if "assumed" in str(each)]
    report = check(result.implementation, "quick", clauses=CLAUSES, dtypes=["float32"])
    assert report.conforms, report.failing


class DoesWithout(OneForAll):
    """Its mask has no default, but may be None."""

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None
    ) -> Tensor:
        if attn_mask is None:
            attn_mask = queries.new_zeros(queries.shape[1], keys.shape[1]).bool()
        return super().forward(queries, keys, values, attn_mask)


def test_mask_that_may_be_none_is_none() -> None:
    assert "mask_required" not in infer(DoesWithout).declaration


def test_required_mask_has_a_convention() -> None:
    with pytest.raises(
        ImplementationError, match="mask_required=True needs the convention of the mask"
    ):
        from_module(Added, parameters={}, mask=None, mask_required=True)
