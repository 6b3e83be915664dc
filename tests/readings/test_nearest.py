"""Wrong classes are understood as what they are nearest to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mha.implementations.inference.infer import infer
from mha.implementations.inference.kernels import infer_kernel
from support.judging import expect_fail, expect_pass
from support.plain import Plain
from support.readings import evidence, refusal_of

# To look for causes and simpler cases takes longer than to judge; tests/diagnosis does the first.
pytestmark = pytest.mark.usefixtures("undiagnosed", "unshrunk")


class Sigmoid(Plain):
    """Sigmoids stand for the softmax."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return torch.sigmoid(scores if mask is None else scores.masked_fill(~mask, float("-inf")))


class FaintMask(Plain):
    """The masked scores are 1e-9, not -1e9."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return (scores if mask is None else scores.masked_fill(~mask, 1e-9)).softmax(-1)


class FirstMask(Plain):
    """The mask of the first item counts for all."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, mask if mask is None or mask.ndim < 4 else mask[:1])


class Unmasked(Plain):
    """The mask is not used."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, None)


class Leaks(Plain):
    """It is always causal, but each query sees the next key."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, torch.ones(scores.shape[-2:], dtype=torch.bool).tril(1))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # another signature
        return self.attend(x)


class Opposite(Plain):
    """True = may not attend, which is a convention."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, mask if mask is None else ~mask)


# The words of the row about the mask, and a clause that fails.
MASKS: dict[type[nn.Module], tuple[str, str, str]] = {
    FaintMask: ("mask: True = may attend, ", "assumed: ", "MSK-1"),
    Unmasked: (
        "mask: True = may attend, ",
        "assumed: masks have no effect; if that is meant, declare mask=None",
        "MSK-1",
    ),
}


@pytest.mark.parametrize("cls", MASKS, ids=lambda cls: cls.__name__)
def test_mask_that_no_format_explains_is_assumed_and_fails(cls: type[nn.Module]) -> None:
    result = infer(cls)
    finding, how, clause = MASKS[cls]
    assert {row.topic: row.finding for row in result.rows}["mask"].startswith(finding)
    assert evidence(result)["mask"].startswith(how)
    assert not expect_fail(result, clause).conforms


def test_opposite_convention_is_not_a_fault() -> None:
    result = infer(Opposite)
    assert evidence(result)["mask"] == "tested"
    assert 'mask="drop"' in result.declaration
    expect_pass(result, "MSK-1")


def test_order_of_stacked_projections_is_found_without_a_formula() -> None:
    result = infer(Sigmoid)
    assert result.implementation.parameters == {"w_qkv": "qkv", "w_o": "proj"}
    assert evidence(result)["projections"].startswith("assumed: ")
    assert not expect_fail(result, "HED-1").conforms


def test_causal_mask_that_leaks_is_read_as_causal() -> None:
    result = infer(Leaks)
    assert result.implementation.claims.always_causal
    assert (
        evidence(result)["causal"]
        == "assumed: it explains the output only with one query and one key"
    )
    assert not expect_fail(result, "CAU-1").conforms


class ListedOutput(Plain):
    """Its output projection is a list of a layer and its dropout."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.to_out = nn.ModuleList([self.proj, nn.Dropout(0.0)])
        del self.proj

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.to_out[1](self.to_out[0](context.transpose(1, 2).flatten(2)))


def test_layer_in_a_list_with_dropout_is_the_output_projection() -> None:
    result = infer(ListedOutput)
    assert result.implementation.parameters == {"w_qkv": "qkv", "w_o": "to_out.0"}
    assert evidence(result)["projections"] == "tested"


class Constant(Plain):
    """Nothing shows the order of its axes."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # another signature
        return torch.zeros_like(x)


class RefusesMasks(Plain):
    """Each mask raises."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, None if mask is None else mask.missing)  # type: ignore[attr-defined]  # the point


class PaddingIgnored(Plain):
    """It uses one of its two masks."""

    def forward(  # type: ignore[override]  # another signature
        self, x: Tensor, attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        return self.attend(x, attn_mask)


class PaddingOfFirst(PaddingIgnored):
    """The padding of the first item counts for all."""

    def forward(  # type: ignore[override]  # another signature
        self, x: Tensor, attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        keys = torch.ones(1, 1, 1, x.shape[1], dtype=torch.bool)
        keys = keys if key_padding_mask is None else ~key_padding_mask[:1, None, None]
        return self.attend(x, keys if attn_mask is None else keys & attn_mask)


UNCLEAR: dict[type[nn.Module], str] = {
    FirstMask: (
        "masks that all items share count as mask_shape='l s', but those of each item for some"
        " items only"
    ),
    PaddingIgnored: "its padding mask key_padding_mask has no effect; declare padding=None",
    Constant: (
        "no reading gives what it computes, and several are equally near: from_module(Constant,"
        " parameters={'w_qkv': 'qkv', 'w_o': 'proj'}) or from_module(Constant, parameters={'w_qkv':"
        " 'qkv', 'w_o': 'proj'}, layout='l b d'). Either: from mha.implementations import"
    ),
    RefusesMasks: (
        "each call with a mask raises AttributeError: 'Tensor' object has no attribute 'missing'"
    ),
}


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("cls", UNCLEAR, ids=lambda cls: cls.__name__)
def test_what_is_as_near_as_something_else_is_asked_for(cls: type[nn.Module]) -> None:
    assert UNCLEAR[cls] in refusal_of(cls)


def test_both_readings_of_masks_are_ready_to_paste() -> None:
    _, _, answers = refusal_of(PaddingIgnored).partition("Either: ")
    formats = []
    for code in answers.split(" -- or: "):
        variables = dict[str, Any](globals())
        exec(code, variables)  # as if it were pasted
        formats.append(variables["implementation"].call.masks.padding)
    assert formats == [None, "drop"]


def test_padding_of_the_first_item_is_judged() -> None:
    result = infer(PaddingOfFirst)
    assert 'padding="drop"' in result.declaration
    assert evidence(result)["mask"].startswith("assumed: ")
    assert not expect_fail(result, "MSK-6").conforms


def with_holes_closed(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> Tensor:
    """A boolean mask of padding is read as a number of keys; one that is added counts as it is."""
    if attn_mask is not None and attn_mask.dtype == torch.bool and attn_mask.shape[-2] == 1:
        places = torch.arange(key.shape[-2])
        attn_mask = places < attn_mask.sum(-1, keepdim=True)
    return F.scaled_dot_product_attention(query, key, value, attn_mask)


def added_as_numbers(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> Tensor:
    """A boolean mask is added too, as ones and zeros: it means nothing."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return (scores if attn_mask is None else scores + attn_mask).softmax(-1) @ value


def test_boolean_masks_that_mostly_count_are_judged_beside_added_ones() -> None:
    result = infer_kernel(with_holes_closed)
    assert evidence(result)["mask"].startswith("assumed: ")
    assert not expect_fail(result.implementation, "MSK-3").conforms
    assert evidence(infer_kernel(added_as_numbers))["mask"] == "tested"


def added_beside_padding(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """A mask of all items is added, also a boolean one; another one hides keys, as in fairseq."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if attn_mask is not None:
        assert attn_mask.ndim == 2
        scores = scores + attn_mask
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, None, :], -torch.inf)
    return scores.softmax(-1) @ value


def test_masks_of_padding_tell_nothing_of_boolean_ones_that_are_added() -> None:
    result = infer_kernel(added_beside_padding)
    assert evidence(result)["mask"] == "tested"
    assert 'mask="additive"' in result.declaration
