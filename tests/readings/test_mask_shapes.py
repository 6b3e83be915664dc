"""Masks in many shapes and kinds: pairs, items, keys, lengths, numbers, and required ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.conformance.faults import registry
from mha.implementations import ImplementationError, from_module
from mha.implementations.inference.infer import infer
from mha.spec import Claims
from support.judging import expect_conforms, expect_pass, judged
from support.plain import Plain
from support.readings import evidence, expect_read, findings, is_tested
from support.right_classes import Fused, Hides, Separate, hidden

# To look for causes and simpler cases takes longer than to judge; tests/diagnosis does the first.
pytestmark = pytest.mark.usefixtures("undiagnosed", "unshrunk")


class OfLengths(Hides):
    """As in d2l: the number of keys that count, of each item."""

    fill = -1e6

    def forward(self, x: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        if valid_lens is None:
            return self.hide(x, None)
        keys = torch.arange(x.shape[1], device=x.device)
        return self.hide(x, keys >= valid_lens[:, None, None, None])


class BiasBesidePadding(Fused):
    """As in MPT: a bias that is added, and a mask of keys, True = may attend."""

    def forward(
        self, x: Tensor, attn_bias: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        added = torch.zeros((), dtype=x.dtype) if attn_bias is None else attn_bias
        if attention_mask is not None:
            added = added.masked_fill(~attention_mask[:, None, None], -math.inf)
        return self.attend(x, added)[0]


class RanksDiffer(Separate):
    """A mask of three dimensions is (B, L, S), and not (H, L, S)."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.attend(x, x, x)[0]
        visible = mask.unsqueeze(1) if mask.ndim == 3 else mask
        return self.attend(x, x, x, hidden(visible).to(x))[0]


class NeedsItsMask(Separate):
    """As in ParlAI: a mask (B, S) that may be None by its default, but not in a call."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        assert mask is not None
        return self.attend(query, key, value, hidden(mask[:, None, None]).to(query))[0]


class Required(nn.Module):
    """The layers of query, key and value are a list, and the names are those of recommenders."""

    def __init__(self, size: int, head_num: int, dropout_rate: float) -> None:
        super().__init__()
        self.head_num = head_num
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(3))
        self.final = nn.Linear(size, size)
        self.dropout = nn.Dropout(dropout_rate)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Add a mask, broadcastable to (B, H, L, S), to the scores."""
        given = zip(self.layers, (query, key, value), strict=True)
        heads = (layer(x).unflatten(-1, (self.head_num, -1)) for layer, x in given)
        q, k, v = (each.transpose(1, 2) for each in heads)
        weights = (q @ k.mT / math.sqrt(q.shape[-1]) + mask).softmax(-1)
        return self.final((self.dropout(weights) @ v).transpose(1, 2).flatten(2))


class Added(Required):
    """As in UER-py."""

    def forward(self, key: Tensor, value: Tensor, query: Tensor, mask: Tensor) -> Tensor:
        return self.attend(query, key, value, mask.type_as(query))


class OneForAll(Required):
    """As in TiSASRec: (L, S), True = may not attend."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor) -> Tensor:
        added = queries.new_zeros(attn_mask.shape).masked_fill(attn_mask, -math.inf)
        return self.attend(queries, keys, values, added[None, None])


class OfMemory(Required):
    """As in XLM: (B, S) or (B, L, S), nonzero = may attend; the memory may be left out."""

    def forward(self, input: Tensor, mask: Tensor, kv: Tensor | None = None) -> Tensor:
        memory = input if kv is None else kv
        rows = mask if mask.ndim == 3 else mask[:, None]
        added = input.new_zeros(rows.shape).masked_fill(rows == 0, -math.inf)
        return self.attend(input, memory, memory, added[:, None])


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize(
    ("cls", "row", "judged"),
    [
        (
            OfLengths,
            "valid_lens: how many of the first keys a query may attend to, of shape 'b'",
            "MSK-3",
        ),
        (
            BiasBesidePadding,
            "attn_bias: added to the scores, broadcastable to (b, h, l, s); attention_mask:"
            " True = may attend",
            "MSK-2",
        ),
        (
            RanksDiffer,
            "True = may attend, of 1, 2 or 4 dimensions, broadcastable to (b, h, l, s)  [tested]",
            "MSK-5",
        ),
        (
            OfMemory,
            "True or 1 = may attend, of shape 'b l s', required in each call  [tested]",
            "MSK-1",
        ),
        (
            OneForAll,
            "True = may not attend, of shape 'l s', required in each call  [tested]",
            "MSK-1",
        ),
        (
            NeedsItsMask,
            "mask: True = may attend, of shape 'b s', required in each call  [tested]",
            "MSK-1",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_class_conforms_as_it_is_read(cls: type[nn.Module], row: str, judged: str) -> None:
    result = expect_read(cls, row, judged)
    assert ("mask_required=True" in result.declaration) == ("required in each call" in row)
    assert is_tested(result)


@pytest.mark.parametrize("cls", [RanksDiffer, NeedsItsMask])
def test_mask_of_another_shape_is_refused_as_the_class_does(cls: type[nn.Module]) -> None:
    expect_pass(cls, "MSK-12")


def test_required_mask_may_be_added() -> None:
    """A later key may count beside the lowest number, which CAU-1 does not require to be hidden."""
    result = infer(Added)
    row = "added to the scores, broadcastable to (b, h, l, s), required in each call"
    assert row in result.report(200)
    assert is_tested(result)
    expect_conforms(result, ["MSK-1", "MSK-2", "CAU-1", "HED-1"])


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


class OfTwoMasks(Separate):
    """Requires two masks, which may be None."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> Tensor:
        added = torch.zeros(())
        if attn_mask is not None:
            added = torch.zeros(attn_mask.shape).masked_fill(attn_mask, -1e9)
        if key_padding_mask is not None:
            keys = torch.zeros(key_padding_mask.shape).masked_fill(key_padding_mask, -1e9)
            added = added + keys[:, None, None]
        return self.attend(x, x, x, added.to(x))[0]


def test_padding_beside_a_mask_that_is_required_is_found() -> None:
    result = infer(OfTwoMasks)
    assert is_tested(result)
    assert 'padding="drop"' in result.declaration


class LaterKeysAllowed(Separate):
    """Its padding is right, and its mask is off by a row."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        added = x.new_zeros(len(x), 1, *2 * x.shape[1:2])
        if attn_mask is not None:
            assert attn_mask.shape == added.shape[2:]
            added = added + hidden(attn_mask.roll(1, 0)).to(x)
        if key_padding_mask is not None:
            added = added + hidden(~key_padding_mask)[:, None, None].to(x)
        return self.attend(x, x, x, added)[0]


def test_mask_is_not_left_unused_because_the_padding_is_right() -> None:
    result = infer(LaterKeysAllowed)
    assert "attn_mask" in findings(result)["mask"]
    assert evidence(result)["mask"].startswith("assumed")


class OneMaskForEach(Separate):
    """Its mask is that of its own keys, and another one is that of the memory's."""

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        keys, kept = (x, mask) if context is None else (context, context_mask)
        kept = x.new_ones(keys.shape[:2], dtype=torch.bool) if kept is None else kept
        assert kept.shape == keys.shape[:2]
        return self.attend(x, keys, keys, hidden(kept)[:, None, None].to(x))[0]


def test_mask_of_the_memory_alone_is_reported() -> None:
    result = infer(OneMaskForEach)
    assert findings(result)["mask"] == "context_mask: True = may attend, of shape 'b s'"
    expect_pass(result, "MSK-2", "MSK-12")


class WithoutBroadcastKeys(Separate):
    """Takes a mask that is broadcast over items, heads and queries, but not over keys."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.attend(x, x, x)[0]
        if mask.shape[-1] != x.shape[1]:
            raise ValueError("the mask does not fit")
        return self.attend(x, x, x, hidden(mask).to(x))[0]

    def weigh(self, scores: Tensor) -> Tensor:
        empty = scores.isneginf().all(-1, keepdim=True)
        return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def test_a_mask_need_not_be_broadcast_over_the_keys() -> None:
    expect_pass(WithoutBroadcastKeys, "MSK-5", "MSK-8", "MSK-9", "PTH-2")


class OfTorch(nn.MultiheadAttention):
    """Without gradients, it takes a fast path with other masks, whose empty rows are NaN."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads, batch_first=True)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]  # as its users write it
        return super().forward(x, x, x, key_padding_mask=key_padding_mask, need_weights=False)[0]


def test_masks_are_those_that_calls_with_gradients_take() -> None:
    result = infer(OfTorch)
    assert 'mask_shape="b s"' in result.declaration
    expect_pass(result, also=["SMX-4", "GRD-5"])


class NumericMask(registry.Correct):
    """Its mask is numeric: 1 = may attend."""

    def forward(  # type: ignore[override]  # another signature
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        projected = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        q, k, v = (self.split(x) for x in projected)
        scores = self.score(q, k)
        if mask is not None:
            scores = scores + (1.0 - mask) * -1e9
        output: Tensor = self.out_proj(self.merge(scores.softmax(-1) @ v))
        return output


def test_numeric_mask_is_inferred() -> None:
    result = infer(NumericMask)
    assert "mask_numbers=True" in result.declaration
    assert "mask: 1 = may attend" in findings(result)["mask"]
    expect_pass(result, "HED-1", also=["MSK-3", "MSK-6", "CAU-2"])


class TakesMasks(Plain):
    """Its mask has a name in the plural."""

    def forward(self, x: Tensor, masks: Tensor | None = None) -> Tensor:
        return self.attend(x, masks)


def test_mask_of_a_name_in_the_plural_is_found() -> None:
    assert findings(infer(TakesMasks))["mask"].startswith("masks: True = may attend")


class OneKeyTooMany(OfLengths):
    """Wrong: one key more than the number given counts."""

    def forward(self, x: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        return super().forward(x, None if valid_lens is None else valid_lens + 1)


PARAMETERS = {"w_qkv": "qkv", "w_o": "out"}


def test_number_of_keys_that_is_read_wrong_fails() -> None:
    claims = Claims(
        cross_attention=False,
        prefix_masks=True,
        per_head_mask=False,
        per_query_mask=False,
        bias={True},
        causal=None,
        empty_row="uniform",
        returns_weights=False,
    )
    declared = from_module(OneKeyTooMany, parameters=PARAMETERS, mask_shape="b", claims=claims)
    report = judged(declared, ["MSK-2", "MSK-3", "MSK-7"])
    assert {verdict.status for verdict in report.verdicts} == {"fail"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"weights": True},
            "weights must be the name of an attribute or, without call=, a place from 0, but is"
            " True",
        ),
        (
            {"call": lambda *_, **options: None, "mask_shape": "b s"},
            "call=... is given masks as the contract has them",
        ),
        (
            {"mask": "drop", "mask_shape": "b"},
            "without s, is for the number of the keys that are kept",
        ),
        (
            {"mask": "additive", "claims": Claims(masks={"bool", "int"})},
            "no call of it can express .*masks=",
        ),
        (
            {"mask": None, "mask_required": True},
            "mask_required=True needs the convention of the mask",
        ),
    ],
)
def test_contradiction_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ImplementationError, match=message):
        from_module(OfLengths, parameters=PARAMETERS, **options)
