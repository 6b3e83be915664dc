"""Layouts without einops do what einops does."""

from __future__ import annotations

import pytest
import torch
from einops import rearrange

from mha.conformance.embedded.layouts import ROWS, Layout

SIZES = {"b": 2, "h": 3, "l": 5, "d": 7}


@pytest.mark.parametrize(
    "pattern", ["b h l d", "b l h d", "l b h d", "(b h) l d", "b l (h d)", "(b l) h d", "b (l h) d"]
)
def test_a_layout_is_the_einops_pattern(pattern: str) -> None:
    whole = torch.arange(2 * 3 * 5 * 7).view(2, 3, 5, 7)
    layout = Layout.read(pattern)
    laid_out = rearrange(whole, f"b h l d -> {pattern}")
    assert torch.equal(layout.from_contract(whole), laid_out)
    assert torch.equal(layout.to_contract(laid_out, {"h": 3, "b": 2}), whole)
    assert layout.pattern == pattern


@pytest.mark.parametrize("pattern", ["b h l", "b h l 1", "(b h) l", "h (b l)", "(b l) h"])
def test_a_layout_of_rows_is_the_einops_pattern(pattern: str) -> None:
    whole = torch.arange(2 * 3 * 5).view(2, 3, 5)
    laid_out = rearrange(whole, f"b h l -> {pattern}")
    assert torch.equal(Layout.read(pattern, ROWS).to_contract(laid_out, SIZES), whole)


@pytest.mark.parametrize(("pattern", "shape"), [("l d", (5, 7)), ("h l d", (3, 5, 7))])
def test_axes_that_are_not_named_have_the_size_1(pattern: str, shape: tuple[int, ...]) -> None:
    x, layout = torch.rand(shape), Layout.read(pattern)
    whole = layout.to_contract(x, {})
    assert whole.shape == (*(1,) * (4 - len(shape)), *shape)
    assert torch.equal(layout.from_contract(whole), x)


@pytest.mark.parametrize("pattern", ["b h l", "b h h d", "b x l d", ""])
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="a layout must name b, h, l, d once"):
        Layout.read(pattern)


def test_a_merged_axis_needs_the_number_of_heads() -> None:
    with pytest.raises(ValueError, match="heads="):
        Layout.read("b l (h d)").to_contract(torch.zeros(2, 5, 21), {})
    with pytest.raises(ValueError, match="has an axis of 21"):
        Layout.read("b l (h d)").to_contract(torch.zeros(2, 5, 21), {"h": 2})
